"""What the gradient is made of: signal and noise, and whose responses carry it."""

import math
from collections.abc import Sequence

from gspo.learner.update import MiniBatchReport
from gspo.metrics.numbers import Metrics, fraction
from gspo.metrics.table import SequenceTable, length_quartiles

_WEIGHT = "gradient_weight"


def gradient_metrics(table: SequenceTable, reports: Sequence[MiniBatchReport]) -> Metrics:
    """A sequence's weight in the gradient is Σ_t |∂ per_sequence / ∂ log π_t|: of the surrogate alone."""
    quarters, noises = table.by_length, [report.noise for report in reports]
    measured = [noise for noise in noises if noise is not None]
    return {
        # Sums before the quotient: that of one mini-batch is a poor estimate, and can be negative.
        "gradient/signal_to_noise": fraction(
            sum(noise.signal for noise in measured), sum(noise.noise for noise in measured)
        ),
        "gradient/signal_to_noise_by_mini_batch": [
            math.nan if noise is None else fraction(noise.signal, noise.noise) for noise in noises
        ],
        "gradient/share_positive": fraction(table.where("sign", 1).total(_WEIGHT), table.total(_WEIGHT)),
        "gradient/share_by_length": [fraction(part.total(_WEIGHT), table.total(_WEIGHT)) for part in quarters],
        "gradient/share_by_length_by_mini_batch": [_shares(part) for part in table.by_mini_batch],
        "response/token_share_by_length": [
            fraction(part.total("num_tokens"), table.total("num_tokens")) for part in quarters
        ],
        "response/length_quartiles": length_quartiles(table.columns["num_tokens"]),
    }


def _shares(part: SequenceTable) -> list[float]:
    """Of one mini-batch's gradient, in the quarters that the whole step is divided into."""
    weights = [quarter.total(_WEIGHT) for quarter in part.by_length]
    return [fraction(weight, sum(weights)) for weight in weights]
