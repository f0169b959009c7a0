"""What the gradient is made of: signal and noise, and whose responses carry it."""

import math
from collections.abc import Sequence

from gspo.learner.item import Trained
from gspo.learner.update import MiniBatchReport
from gspo.metrics.lengths import by_length, length_quartiles
from gspo.metrics.numbers import Metrics, fraction
from gspo.types import Batch


def gradient_metrics(batch: Batch, reports: Sequence[MiniBatchReport], trained: Sequence[Trained]) -> Metrics:
    """A sequence's weight in the gradient is Σ_t |∂ per_sequence / ∂ log π_t|: of the surrogate alone."""
    lengths = by_length(trained)
    weight, tokens = _weight(trained), sum(item.num_tokens for item in trained)
    positive = [item for item in trained if batch.advantages[item.index] > 0]
    return {
        **_noise_metrics(reports),
        "gradient/share_positive": fraction(_weight(positive), weight),
        "gradient/share_by_length": [fraction(_weight(part), weight) for part in lengths],
        "gradient/share_by_length_by_mini_batch": [_shares(lengths, number) for number in range(len(reports))],
        "response/token_share_by_length": [fraction(sum(item.num_tokens for item in part), tokens) for part in lengths],
        "response/length_quartiles": length_quartiles(trained),
    }


def _noise_metrics(reports: Sequence[MiniBatchReport]) -> Metrics:
    """Sums before the quotient: that of one mini-batch is a poor estimate, and can be negative."""
    measured = [report.noise for report in reports if report.noise is not None]
    return {
        "gradient/signal_to_noise": fraction(sum(one.signal for one in measured), sum(one.noise for one in measured)),
        "gradient/signal_to_noise_by_mini_batch": [
            math.nan if report.noise is None else fraction(report.noise.signal, report.noise.noise)
            for report in reports
        ],
    }


def _shares(lengths: Sequence[Sequence[Trained]], mini_batch: int) -> list[float]:
    """Of one mini-batch's gradient, in the parts that the whole step is divided into."""
    weights = [_weight([item for item in part if item.mini_batch == mini_batch]) for part in lengths]
    return [fraction(weight, sum(weights)) for weight in weights]


def _weight(items: Sequence[Trained]) -> float:
    return sum(item.gradient_weight for item in items)
