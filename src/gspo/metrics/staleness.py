"""How old the tokens of a step are: how many steps have been made since the policy was that which wrote them."""

from collections import Counter
from collections.abc import Sequence
from math import ceil, nan

from gspo.metrics.numbers import Metrics
from gspo.types import Batch, Drawn, Timeline


def staleness_metrics(batch: Batch, *, updates_per_step: int) -> Metrics:
    """The age of the tokens that are trained on; the groups that were too old have none."""
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


def source_metrics(ahead: Sequence[Drawn], timeline: Timeline | None) -> Metrics:
    """Return what is sampled ahead as a step ends, and when in it the trainer waited and the engine sampled.

    No timeline: another process has begun the step.
    """
    waited, sampled = ([], []) if timeline is None else (timeline.waited, timeline.sampled)
    seconds = nan if timeline is None else timeline.seconds
    num_waiting = sum(drawn.group is not None for drawn in ahead)
    return {
        "source/in_flight": float(len(ahead) - num_waiting),
        "source/waiting": float(num_waiting),
        "source/trainer_idle_fraction": _total(waited) / seconds,
        "source/engine_idle_fraction": 1 - _total(sampled) / seconds,
        "source/trainer_waited_seconds": [moment for span in waited for moment in span],
        "source/engine_sampled_seconds": [moment for span in sampled for moment in span],
    }


def _total(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
