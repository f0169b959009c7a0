"""Signals that end a run: the first asks it to save itself, the second ends it at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

from gspo.errors import Stopped
from gspo.ranks import stop_all

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """A context in which SIGINT, SIGTERM or SIGHUP sets `signal`; whoever may be stopped asks `check_stop`."""

    def __init__(self, alert: Callable[[str], object], ending: str = "ending, and saving what is done") -> None:
        self.signal: signal.Signals | None = None  # the first that came
        self._alert, self.ending = alert, ending  # what is said to the first
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]  # None: one set from C

    def check_stop(self) -> None:
        """Raises Stopped where a signal has come; to be called where the stage under way may be dropped."""
        if self.signal is not None:
            raise Stopped(self.signal)

    def check_stop_of_all(self) -> None:
        """The same where a signal has come to any rank; every rank has to call it."""
        try:
            stop_all(self.signal)
        except Stopped as stop:
            self.signal = stop.args[0]
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing is raised here: the code that is interrupted may be anybody's.
        self.signal = signal.Signals(number)
        # The second is the system's: it ends the process whatever that is doing (Ctrl-C: as KeyboardInterrupt).
        for other in self._previous:
            signal.signal(other, signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL)
        again = "Ctrl-C" if number == signal.SIGINT else self.signal.name
        self._alert(f"{self.ending} ({again} again: end at once)")
