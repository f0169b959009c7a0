"""Signals that end a run: the first asks it to save itself, the second ends it at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal has asked the run to end; no `except Exception` on the way holds it up."""


class Interrupt:
    """A context in which SIGINT, SIGTERM or SIGHUP sets `signal`, and cuts short what may be cut short."""

    def __init__(self, alert: Callable[[str], object]) -> None:
        self.signal: signal.Signals | None = None  # the first that came
        self._alert = alert
        self._may_stop = False
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

    @contextmanager
    def may_stop(self) -> Iterator[None]:
        """A stretch that leaves the run's state as it is until it has ended, so that a signal may cut it short."""
        self._may_stop = True
        try:
            self.check()  # after the line above, so that no signal falls between the two
            yield
        finally:
            self._may_stop = False

    def check(self) -> None:
        """Raises Stopped where a signal has come."""
        if self.signal is not None:
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        # The second is the system's: it ends the process whatever that is doing (Ctrl-C: as KeyboardInterrupt).
        for one in self._previous:
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
        again = "Ctrl-C" if number == signal.SIGINT else self.signal.name
        self._alert(f"saving and ending ({again} again: end at once)")
        if self._may_stop:
            raise Stopped
