"""When the trainer waits and when the engine samples."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """The times in which at least one block of `open` was under way, of any thread or coroutine."""

    def __init__(self) -> None:
        self._lock, self._num_open, self._opened = threading.Lock(), 0, 0.0
        self._closed: list[tuple[float, float]] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Count the block as under way."""
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._opened = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._closed.append((self._opened, time.monotonic()))

    def since(self, start: float) -> list[tuple[float, float]]:
        """The spans from a moment on until now, in seconds after it; what was over before is forgotten."""
        with self._lock:
            self._closed = [span for span in self._closed if span[1] > start]
            spans = [*self._closed, *([(self._opened, time.monotonic())] if self._num_open else [])]
        return [(max(0.0, opened - start), closed - start) for opened, closed in spans]
