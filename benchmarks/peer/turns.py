"""A side of the comparison is a process that works only when it is its turn: one rollout batch and its updates."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import peak_memory, reset_peak_memory


class Turns:
    """Waits on standard input for leave to work, and answers on standard output what a turn took."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever the libraries print goes to standard error
        self._started: float | None = None
        self._memory_before = 0
        self._work: dict[str, Any] = {}

    def add(self, **work: Any) -> None:
        """What this turn has done: counts and seconds add up."""
        for name, value in work.items():
            self._work[name] = self._work.get(name, 0) + value

    def next(self) -> None:
        """End the turn under way, if there is one, and wait for the next."""
        now = time.perf_counter()
        if self._started is not None:
            above = _peak() - self._memory_before
            self._answer({**self._work, "seconds": now - self._started, "peak_bytes": above})
        else:
            self._memory_before = _reset_peak()
            self._answer({"ready": True})
        self._work = {}
        if sys.stdin.readline().strip() != "go":
            self._answers.close()
            os._exit(0)  # in the middle of a training loop that knows nothing of turns
        self._started = time.perf_counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its seconds added to this turn's."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.add(**{name: time.perf_counter() - started})
            return result

        return wrapper

    def _answer(self, values: dict[str, Any]) -> None:
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()


def _reset_peak() -> int:
    """Count the peak from here on; bytes held now."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return reset_peak_memory()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else peak_memory()
