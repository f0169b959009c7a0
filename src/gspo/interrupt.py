"""Signals that end a run: the first asks it to save itself, the second ends it at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

from gspo.errors import Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_entered: list["Interrupt"] = []  # signals are the process's, and so is this


def signal_heard() -> signal.Signals | None:
    """The signal that has asked this process to end what it does within an Interrupt, if one has."""
    return next((interrupt.signal for interrupt in _entered if interrupt.signal is not None), None)


def check_stop() -> None:
    """Raise Stopped where a signal has come; to be called where the stage under way may be dropped."""
    if (number := signal_heard()) is not None:
        raise Stopped(number)


class Interrupt:
    """A context in which SIGINT, SIGTERM or SIGHUP sets `signal`; whatever may be stopped calls `check_stop`."""

    def __init__(self, alert: Callable[[str], object], ending: str = "ending, and saving what is done") -> None:
        self.signal: signal.Signals | None = None  # the first that came
        self._alert, self.ending = alert, ending  # what is said to the first
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job
                    self._previous[number] = signal.signal(number, self._handle)
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _entered.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]  # None: one set from C

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing is raised here: the code that is interrupted may be anybody's.
        self.signal = signal.Signals(number)
        # The second is the system's: it ends the process whatever that is doing (Ctrl-C: as KeyboardInterrupt).
        for other in self._previous:
            signal.signal(other, signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL)
        again = "Ctrl-C" if number == signal.SIGINT else self.signal.name
        self._alert(f"{self.ending} ({again} again: end at once)")
