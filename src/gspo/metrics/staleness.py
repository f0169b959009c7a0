"""How old the tokens of a step are: how many steps have been made since the policy was that which wrote them."""

from collections import Counter
from collections.abc import Sequence
from math import ceil

from gspo.metrics.numbers import Metrics
from gspo.types import Batch, Drawn


def staleness_metrics(batch: Batch, *, updates_per_step: int) -> Metrics:
    """Of the tokens that are trained on; the groups that were too old have none."""
    tokens: Counter[int] = Counter()
    for sample in batch.samples:
        for version, count in sample.versions:
            tokens[ceil((batch.version - version) / updates_per_step)] += count
    ages = range(max(tokens, default=0) + 1)
    return {
        "staleness/mean": sum(age * tokens[age] for age in ages) / max(1, tokens.total()),
        "staleness/max": float(ages[-1]),
        "staleness/tokens_by_age": [float(tokens[age]) for age in ages],
        "staleness/dropped_groups": float(batch.num_too_old),
    }


def source_metrics(ahead: Sequence[Drawn], idle_fractions: tuple[float, float]) -> Metrics:
    """What is sampled ahead as a step ends; the shares of it in which the trainer waited and the engine did."""
    num_waiting = sum(drawn.group is not None for drawn in ahead)
    return {
        "source/in_flight": float(len(ahead) - num_waiting),
        "source/waiting": float(num_waiting),
        "source/trainer_idle_fraction": idle_fractions[0],
        "source/engine_idle_fraction": idle_fractions[1],
    }
