"""The seconds of a run, and of each stage of the step under way."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Clock:
    """Counts from when it is made, or goes on from what a resumed run has counted.

    A stage is timed within `watch(name)`, a context of its own.
    """

    def __init__(self, watch: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self._watch = watch
        self.seconds: dict[str, float] = {}  # of the step under way, by stage
        self._start = time.monotonic()  # never the wall clock, which may be set back

    def resume(self, elapsed: float) -> None:
        """Go on from the seconds that earlier processes have counted."""
        self._start = time.monotonic() - elapsed

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, those before a resume included."""
        return time.monotonic() - self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to a stage."""
        with self._watch(name):
            start = time.perf_counter()
            try:
                yield
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds to another stage than the one within which they passed."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds
