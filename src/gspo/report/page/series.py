"""A number over the steps: of one run, or the mean and spread of an arm's seeds."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.report.page.arms import Arm


@dataclass(frozen=True, kw_only=True)
class Series:
    """One number's curve; None where no run has it at a step."""

    steps: Sequence[int]
    means: Sequence[float | None]
    deviations: Sequence[float | None]  # over the seeds that have it, with n - 1; None for a single one

    @property
    def has_deviations(self) -> bool:
        """Whether at some step there is more than one seed."""
        return any(one is not None for one in self.deviations)

    @property
    def without_gaps(self) -> "Series":
        """Of the steps at which there is a number."""
        rows = [row for row in zip(self.steps, self.means, self.deviations, strict=True) if row[1] is not None]
        steps, means, deviations = zip(*rows, strict=True)
        return Series(steps=steps, means=means, deviations=deviations)


def series_of(arm: Arm, name: str, *place: int) -> Series | None:
    """The curve of a metric, of the number at `place` where it is a list (of lists); None where no run has ever one."""
    values = [(step, [_number(line, name, place) for line in lines]) for step, lines in arm.drawn]
    known = [(step, [value for value in row if math.isfinite(value)]) for step, row in values]
    if not any(row for _, row in known):
        return None
    kept = [(step, row) for step, row in known if row or step > 0]
    return Series(
        steps=[step for step, _ in kept],
        means=[statistics.fmean(row) if row else None for _, row in kept],
        deviations=[statistics.stdev(row) if len(row) > 1 else None for _, row in kept],
    )


def from_to(arm: Arm, name: str) -> str:
    """The first and the last number of a metric, with the deviation over the seeds where there are any."""
    series = series_of(arm, name)
    if series is None:
        return "–"
    known = series.without_gaps
    told = [
        f"{mean:.4g}" + ("" if deviation is None else f" ± {deviation:.2g}")
        for mean, deviation in zip(known.means, known.deviations, strict=True)
    ]
    return told[0] if len(told) == 1 else f"{told[0]} → {told[-1]}"


def length_of(arm: Arm, name: str) -> int:
    """How many numbers a list-valued metric has; 0 where it is none."""
    lists = (line[name] for run in arm.runs for line in run.lines if isinstance(line.get(name), list))
    return max(map(len, lists), default=0)


def places_of(arm: Arm, name: str) -> set[tuple[int, ...]]:
    """Where a list-valued metric has its numbers, those of lists in it too; none where it is no list."""
    lists = (line[name] for run in arm.runs for line in run.lines if isinstance(line.get(name), list))
    return {place for found in lists for place in _places(found)}


def _places(value: Any) -> Iterator[tuple[int, ...]]:
    if not isinstance(value, list):
        yield ()
        return
    for number, item in enumerate(value):
        yield from ((number, *rest) for rest in _places(item))


def _number(line: Mapping[str, Any], name: str, place: Sequence[int]) -> float:
    value = line.get(name, math.nan)
    for number in place:
        value = value[number] if isinstance(value, list) and number < len(value) else math.nan
    return float(value) if isinstance(value, int | float) else math.nan
