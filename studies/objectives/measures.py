"""From results to numbers: what the tables say of a run, and when two arms are apart."""

import math
from collections.abc import Callable

from studies.harness.results import Result, Results
from studies.harness.summary import Measure, deviation, difference, mean, over_seeds

LATE = 5  # steps
SETTLING = 5  # steps before a clip range that sets itself is judged
MAX_GRAD_NORM = 1.0  # actor.optimizer.max_grad_norm, the default
# Student's t, two-sided 5 %, by the seeds that both arms have: 2 seeds leave 1 degree of freedom, 3 leave 2.
CRITICAL = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}


def late(metric: str) -> Measure:
    """The mean over the last steps; a step that a failed run never made counts 0."""

    def measure(result: Result) -> float:
        made = result.values(metric)[result.steps - LATE :]
        return sum(made) / LATE

    return measure


def settled(metric: str) -> Measure:
    """The mean over the steps after the first few."""
    return lambda result: mean(result.values(metric)[SETTLING:])


def last(metric: str) -> Measure:
    """Of the last step."""
    return lambda result: result.values(metric)[-1] if result.values(metric) else math.nan


def gain(result: Result) -> float:
    """Mean reward of the last steps above that of the first ones."""
    rewards = result.values("reward/mean")
    return mean(rewards[-LATE:]) - mean(rewards[:3]) if len(rewards) > LATE else math.nan


def share(metric: str, is_so: Callable[[float], bool]) -> Measure:
    """The fraction of steps of which something is so."""
    return lambda result: mean([float(is_so(value)) for value in result.values(metric) if math.isfinite(value)])


def is_apart(arm: Results, other: Results, measure: Measure) -> bool:
    """Whether two arms are further apart than seeds explain, by three conditions at once.

    The same sign in every seed; more than t (5 %) paired standard errors; more than the larger standard deviation.
    """
    seeds = sorted(arm.keys() & other.keys())
    found, pairs = difference(arm, other, measure), [measure(arm[seed]) - measure(other[seed]) for seed in seeds]
    if len(seeds) not in CRITICAL or not all(map(math.isfinite, pairs)):
        return False
    same_sign = all(pair > 0 for pair in pairs) or all(pair < 0 for pair in pairs)
    spreads = max(deviation(over_seeds(one, measure)) for one in (arm, other))
    return same_sign and abs(found.mean) > max(CRITICAL[len(seeds)] * found.paired_error, spreads)
