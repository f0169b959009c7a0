"""What a reward function gets of the run, and what it logs: TRL's log_metric and log_extra, and verl's dictionaries."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from gspo.errors import encodable

MAX_NUMBER = 1e100  # so that sums, and the squares of them that a deviation takes, are still numbers
MAX_NAMES, MAX_TEXT = 32, 1000  # metrics or columns of a function; characters of a cell
MAX_CHARACTERS = 400  # of what a function says of itself: it is written beside every rollout it masks
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ ./@%+-]{0,63}")

Metrics = dict[str, tuple[float, int]]  # by name, the sum of the values and how many there are
Cell = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The numbers of transformers' TrainerState that a reward can depend on, under the same names.

    Example: TrainerState(global_step=12, max_steps=200, epoch=0.75) in step 13 of 200
    """

    global_step: int = 0  # finished: rollout batches, not optimiser steps
    max_steps: int = 1
    epoch: float = 0.0  # passes over the queries


class Log:
    """What one call logs for its `size` completions; what cannot be taken is left out, and `refused` says why first."""

    def __init__(self, size: int) -> None:
        self.metrics: Metrics = {}
        self.refused = ""
        self.columns: dict[str, list[Cell]] = {}
        self._size = size

    def metric(self, name: str, value: float) -> None:
        """Note a number; a step's metric is the mean over the step's calls, as in TRL."""
        number, call = plain(value), f"log_metric({name!r:.40}, …)"
        if not (isinstance(number, Real) and abs(number) <= MAX_NUMBER):  # type: ignore[operator]
            self._refuse(f"{call}: {number!r:.40} is no finite number")
        elif self._takes(name, self.metrics, call):
            total, count = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = (total + float(number), count + 1)

    def extra(self, column: str, values: Any) -> None:
        """Note a value for each completion."""
        call = f"log_extra({column!r:.40}, …)"
        values = values.tolist() if hasattr(values, "tolist") else values
        if not (isinstance(values, list | tuple) and len(values) == self._size):
            self._refuse(f"{call}: {repr(values)[:40]} is no list with a value for each completion, {self._size}")
        elif self._takes(column, self.columns, call):
            self.columns[column] = [*map(_cell, values)]

    def scores(self, results: Sequence[Any]) -> list[Any]:
        """The scores of results that come one a completion; what a mapping with a `score` has besides it is logged."""
        are_verl = [isinstance(result, Mapping) and "score" in result for result in results]
        extras = [dict(result) if is_verl else {} for result, is_verl in zip(results, are_verl, strict=True)]
        scores = [extra.pop("score", result) for result, extra in zip(results, extras, strict=True)]
        for name in dict.fromkeys(name for extra in extras for name in extra):
            cells = [plain(extra.get(name)) for extra in extras]
            self.extra(name, cells)
            for number in (cell for cell in cells if isinstance(cell, int | float)):
                self.metric(name, number)
        return scores

    def _takes(self, name: Any, there: Mapping[str, Any], call: str) -> bool:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            return self._refuse(f"{call}: a name has 64 letters, digits, spaces and _./@%+- at most")
        if name not in there and len(there) >= MAX_NAMES:
            return self._refuse(f"{call}: it has logged {MAX_NAMES} names already, the most there may be")
        return True

    def _refuse(self, what: str) -> bool:
        self.refused = self.refused or encodable(what)[:MAX_CHARACTERS]
        return False


def plain(value: Any) -> Any:
    """A value without numpy and torch, whose arrays of one number pass for that number."""
    if not hasattr(value, "tolist"):
        return value
    number = value.tolist()
    while isinstance(number, list) and len(number) == 1:
        number = number[0]
    return number


def _cell(value: Any) -> Cell:
    """A value as a file holds it: a number that is none, such as NaN, is null; anything else is text."""
    value = plain(value)
    if value is None or isinstance(value, int | float):
        return value if value is not None and abs(value) <= MAX_NUMBER else None
    return encodable(str(value)[:MAX_TEXT])[:MAX_TEXT]
