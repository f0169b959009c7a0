"""What the metrics of every subject are made of: NaN, which is written as null, stands for what does not exist."""

import math
from collections.abc import Sequence

from gspo.policy.item import Trained

Metrics = dict[str, float | list[float] | list[list[float]]]


def fraction(part: float, whole: float) -> float:
    """NaN where there is nothing to divide by."""
    return part / whole if whole else math.nan


def mean(values: Sequence[float]) -> float:
    """NaN of nothing, and of infinities that cancel: a step that diverged still gets its line."""
    return fraction(sum(values), len(values))


def parts_of(trained: Sequence[Trained], num_mini_batches: int) -> list[list[Trained]]:
    """The sequences of each mini-batch; of one that trained nothing, none."""
    return [[item for item in trained if item.mini_batch == number] for number in range(num_mini_batches)]
