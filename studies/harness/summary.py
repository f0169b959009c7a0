"""From results to numbers: means over seeds, differences between arms, what counts as learned and as collapsed."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from studies.harness.results import Result, Results

Measure = Callable[[Result], float]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One arm minus another."""

    mean: float
    unpaired_error: float  # standard error, the seeds of the two arms taken as independent
    paired_error: float  # of the mean of the differences seed by seed: a seed fixes queries and their order
    seeds: int  # that both arms have


def late_reward(result: Result) -> float:
    """Mean training reward over the last quarter of the steps; a step that a failed run never made counts 0."""
    wanted = _quarter(result.steps)
    made = result.values("reward/mean")[result.steps - wanted :]
    return sum(made) / wanted


def mean_reward(result: Result) -> float:
    """Mean training reward over all steps: how early it is learned counts too."""
    return sum(result.values("reward/mean")) / result.steps


def has_collapsed(result: Result) -> bool:
    """Whether the reward of the last quarter is below half of the best quarter's: more than noise would do."""
    size, rewards = _quarter(result.steps), result.values("reward/mean")
    quarters = [statistics.fmean(rewards[start : start + size]) for start in range(0, len(rewards) - size + 1, size)]
    return not quarters or late_reward(result) < max(quarters) / 2


def reward_at(compute: float) -> Measure:
    """Mean training reward over the last quarter of a budget of forward-token equivalents.

    Each step counts by the part of that quarter it was spent in; what a failed run never spent counts 0.
    """

    def measure(result: Result) -> float:
        start, total, before = 0.75 * compute, 0.0, 0.0
        for spent, reward in zip(result.compute(), result.values("reward/mean"), strict=True):
            total += reward * max(0.0, min(spent, compute) - max(before, start))
            before = spent
        return total / (compute - start)

    return measure


def common_compute(arms: Sequence[Results]) -> float:
    """What every run that was not broken off has spent."""
    spent = [result.compute()[-1] for arm in arms for result in arm.values() if not result.failed]
    return min(spent, default=math.nan)


def final_pass_at_1(result: Result) -> float:
    """After the last step; 0 for a run that failed before it."""
    return result.pass_at_1[1] if len(result.pass_at_1) > 1 else 0.0


def mean_of(metric: str) -> Measure:
    """The mean of a metric over the steps that have it."""
    return lambda result: mean(result.values(metric))


def largest(metric: str) -> Measure:
    """The largest value of a metric."""
    return lambda result: max((value for value in result.values(metric) if math.isfinite(value)), default=math.nan)


def mean(values: Sequence[float]) -> float:
    """Of the finite ones; not a number where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def deviation(values: Sequence[float]) -> float:
    """Standard deviation (n − 1) of the finite ones; not a number for fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.stdev(finite) if len(finite) > 1 else math.nan


def over_seeds(arm: Results, measure: Measure) -> list[float]:
    """A measure of each seed's run."""
    return [measure(result) for result in arm.values()]


def difference(arm: Results, other: Results, measure: Measure) -> Difference:
    """The measure of one arm minus that of the other, over the seeds that both have."""
    seeds = sorted(arm.keys() & other.keys())
    ours, theirs = [measure(arm[seed]) for seed in seeds], [measure(other[seed]) for seed in seeds]
    pairs = [one - two for one, two in zip(ours, theirs, strict=True)]
    finite = sum(math.isfinite(pair) for pair in pairs)
    root = math.sqrt(finite) if finite else math.nan
    return Difference(
        mean=mean(pairs),
        unpaired_error=math.hypot(deviation(ours), deviation(theirs)) / root,
        paired_error=deviation(pairs) / root,
        seeds=len(seeds),
    )


def _quarter(steps: int) -> int:
    return max(1, steps // 4)
