"""Ctrl-C as a request: the run ends at the next safe place, a second one ends it at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A context in which the first SIGINT sets `requested` and the second raises KeyboardInterrupt."""

    def __init__(self, alert: Callable[[str], object]) -> None:
        self.requested = False
        self._alert = alert
        self._previous: object = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """A stretch that Ctrl-C cannot cut short, such as writing the model."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._alert("ending after this step and saving the model (Ctrl-C again: end at once)")
