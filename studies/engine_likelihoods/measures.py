"""What taking the engine's likelihoods as π_old changes, and whether that is tolerated."""

import math
from dataclasses import dataclass
from typing import Literal

from studies.engine_likelihoods.arms import Objective, arm
from studies.engine_likelihoods.runs import Runs
from studies.harness.results import Result
from studies.harness.summary import Measure, difference
from studies.objectives.measures import CRITICAL, is_apart, late

LATE_REWARD = late("reward/mean")
MOST_LOST = 0.05  # of late reward, that still counts as tolerated

Verdict = Literal["tolerated", "not tolerated", "open"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A measure with the engine's likelihoods as π_old minus the same with recomputed ones."""

    mean: float
    low: float  # of the 95 % interval of the paired difference
    high: float
    seeds: int
    is_apart: bool  # further than seeds explain

    @property
    def verdict(self) -> Verdict:
        """Not tolerated is a loss that seeds do not explain; tolerated one that is small for certain."""
        if self.is_apart and self.mean < 0:
            return "not tolerated"
        return "tolerated" if self.low >= -MOST_LOST else "open"


def change(runs: Runs, objective: Objective, dtype: str, measure: Measure) -> Change:
    """Over the seeds that have both runs; nothing is certain of fewer than two."""
    pair = (runs.of(arm(objective, dtype, "engine")), runs.of(arm(objective, dtype, "recompute")))
    found = difference(*pair, measure)
    width = CRITICAL[found.seeds] * found.paired_error if found.seeds in CRITICAL else math.inf
    width = math.inf if math.isnan(width) else width
    return Change(
        mean=found.mean,
        low=found.mean - width,
        high=found.mean + width,
        seeds=found.seeds,
        is_apart=is_apart(*pair, measure),
    )


def in_first_mini_batch(metric: str) -> Measure:
    """Mean over the steps, of the mini-batch before which nothing has been updated: with recomputed likelihoods 0."""

    def measure(result: Result) -> float:
        row = result.means.get(f"{metric}_by_mini_batch", ())
        return row[0] if row and row[0] is not None else math.nan

    return measure
