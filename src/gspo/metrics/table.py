"""The trained sequences of a step as one table, which the metrics group by mini-batch, by length and by sign."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import torch

from gspo.metrics.numbers import fraction
from gspo.types import Sample, SequenceStats

QUARTILES = (0.25, 0.5, 0.75, 1.0)
_NUMBERS = [field.name for field in fields(SequenceStats) if field.type in (int, float)]


@dataclass(frozen=True, kw_only=True)
class SequenceTable:
    """A row for each trained sequence, a column for each number of its `SequenceStats`, and five that follow from them.

    `sign` is the advantage's; `any_clipped` whether a token is; `correction_sum` the sum of the tokens' weights;
    `mismatch` the mean log π_old/π_engine; `quarter`, from 0, the part of the step's sequences by length. Example:
    SequenceTable(columns={"num_tokens": [12, 40], "sign": [1, -1], "mini_batch": [0, 1], …}, num_mini_batches=2)
    """

    columns: Mapping[str, Sequence[float]]
    num_mini_batches: int

    def __len__(self) -> int:
        return len(self.columns["num_tokens"])

    def tensor(self, name: str) -> torch.Tensor:
        """A column in double precision."""
        return torch.tensor(self.columns[name], dtype=torch.float64)

    def total(self, name: str) -> float:
        """The sum of a column."""
        return sum(self.columns[name])

    def share(self, part: str, whole: str = "num_tokens") -> float:
        """The sum of one column over that of another; NaN where that is 0."""
        return fraction(self.total(part), self.total(whole))

    def where(self, name: str, value: float) -> Self:
        """The rows with this value in a column."""
        rows = [row for row, own in enumerate(self.columns[name]) if own == value]
        return replace(self, columns={key: [column[row] for row in rows] for key, column in self.columns.items()})

    @cached_property
    def by_mini_batch(self) -> list[Self]:
        """The rows of each mini-batch; none of one that trained nothing."""
        return [self.where("mini_batch", number) for number in range(self.num_mini_batches)]

    @cached_property
    def by_length(self) -> list[Self]:
        """The rows of each quarter, the shortest first; equal lengths stay together, so a quarter can be empty."""
        return [self.where("quarter", number) for number in range(len(QUARTILES))]

    def measure(self, name: str, measure: Callable[[Self], Any]) -> Any:
        """Of the rows; a list, of each mini-batch or quarter, where the metric's name ends in `_by_…`."""
        for end, parts in (("_by_mini_batch", self.by_mini_batch), ("_by_length", self.by_length)):
            if name.endswith(end):
                return [part.measure(name.removesuffix(end), measure) for part in parts]
        return measure(self)


def sequence_table(samples: Sequence[Sample], num_mini_batches: int) -> SequenceTable:
    """The table of those samples that the update has trained."""
    rows = [(sample, sample.stats) for sample in samples if sample.stats is not None]
    columns = {name: [getattr(stats, name) for _, stats in rows] for name in _NUMBERS}
    columns["sign"] = [(sample.advantage > 0) - (sample.advantage < 0) for sample, _ in rows]
    columns["any_clipped"] = [stats.num_clipped > 0 for _, stats in rows]
    columns["correction_sum"] = [stats.correction_weight * stats.num_tokens for _, stats in rows]
    gaps = [stats.old_logprobs - sample.sampler_logprobs for sample, stats in rows]
    columns["mismatch"] = [float(gap.double().mean()) for gap in gaps]
    bounds = torch.tensor(quantiles(columns["num_tokens"], QUARTILES)[:-1], dtype=torch.float64)
    # The first quarter whose bound is not below the length.
    columns["quarter"] = torch.bucketize(torch.tensor(columns["num_tokens"], dtype=torch.float64), bounds).tolist()
    return SequenceTable(columns=columns, num_mini_batches=num_mini_batches)


def quantiles(values: Sequence[float], fractions: Sequence[float]) -> list[float]:
    """Interpolated; NaN of nothing."""
    if not values:
        return [math.nan] * len(fractions)
    points = torch.tensor(fractions, dtype=torch.float64)
    return torch.quantile(torch.tensor(values, dtype=torch.float64), points).tolist()
