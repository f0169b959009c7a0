"""The steps of a run as its directory has them, read as it grows and each only once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.metrics.numbers import numbers
from gspo.report.shapes import is_step, sample, section
from gspo.run.plain_files import for_reading, parsed
from gspo.trackers.growing import GrowingLog

COLUMNS = ("query", "prompt", "completion", "reward", "advantage", "sequence_ratio", "clipped", "finish_reason")
MAX_TABLES = 20  # of a run
MAX_ROWS = 8  # of a table


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is sent of a step."""

    number: int
    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]]  # the rows of a table, for some of the steps


class Steps:
    """What has been written and not been read yet, from the step after `after` on."""

    def __init__(self, run: Path, recipe: Mapping[str, Any], *, after: int) -> None:
        self._log = GrowingLog(run / "metrics.jsonl")
        self._rollouts = run / "rollouts"
        self._with_table = _steps_with_table(recipe)
        self._num_rows = _rows_of_a_table(recipe)
        self._after = after
        self._waiting: list[Mapping[str, Any]] = []

    def new(self, *, is_over: bool) -> Iterator[Step]:
        """Those that are whole by now; where the run is over, the last one in any case.

        A step's rollouts are written after its line, so the last line waits for its table's rows.
        """
        found = [line for line in self._log.new() if is_step(line.get("step"))]
        # Of a run that was cut back, steps are written again, bit by bit equal: they have been read.
        self._waiting += [line for line in found if line["step"] > self._after]
        while self._waiting:
            line = self._waiting[0]
            has_table = line["step"] in self._with_table
            samples = self._samples(line["step"]) if has_table else ()
            if has_table and len(samples) < self._num_rows and len(self._waiting) == 1 and not is_over:
                return
            self._after = line["step"]
            self._waiting = [line for line in self._waiting if line["step"] > self._after]
            yield Step(number=self._after, metrics=metrics_of(line), samples=samples)

    def _samples(self, step: int) -> Sequence[Mapping[str, Any]]:
        try:
            with open(self._rollouts / f"step_{step:06d}.jsonl", "rb", opener=for_reading) as file:
                rows = [parsed(line) for line in islice(file, MAX_ROWS) if line.endswith(b"\n")]
        except FileNotFoundError:
            return ()
        samples = [sample(row) for row in rows if row is not None]
        return [{column: _encodable(row.get(column)) for column in COLUMNS} for row in samples]


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """A line's numbers under their names, those of a list under name/0, name/1, …; without those that are none."""
    return dict(pair for name, value in numbers(line).items() if name != "step" for pair in _numbers(name, value))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list):
        for place, item in enumerate(value):
            yield from _numbers(f"{name}/{place}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value


def _steps_with_table(recipe: Mapping[str, Any]) -> set[int]:
    """Evenly spread, the last one among them."""
    steps = recipe["steps"] if is_step(recipe["steps"]) else 0
    return {-(-steps * number // MAX_TABLES) for number in range(1, MAX_TABLES + 1)}


def _rows_of_a_table(recipe: Mapping[str, Any]) -> int:
    if not section(recipe, "report").get("rollouts", True):
        return 0
    rollout = section(recipe, "rollout")
    counts = rollout.get("queries_per_step", MAX_ROWS), rollout.get("group_size", 1)
    return min(MAX_ROWS, counts[0] * counts[1]) if all(map(is_step, counts)) else 0


def _encodable(value: Any) -> Any:
    """JSON can write half a character, which no tracker can."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
