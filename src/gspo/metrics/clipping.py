"""What the clip range does, to whom and on which side; whose responses carry the gradient, and how much is signal."""

import math
from collections.abc import Sequence

from gspo.learner.update import MiniBatchReport
from gspo.metrics.numbers import Metrics, fraction
from gspo.metrics.table import SequenceTable, length_quartiles


def clip_metrics(table: SequenceTable, reports: Sequence[MiniBatchReport]) -> Metrics:
    """Over the trained sequences; by mini-batch too, for the first one's ratio is 1 always."""
    parts, quarters = table.by_mini_batch, table.by_length
    low, high = reports[-1].clip_range
    metrics: Metrics = {
        "clip/low": low,
        "clip/high": high,
        # 0, not nothing, where nothing was trained: a diagnosis of clipping needs a number.
        "clip/sequence_fraction": _sequences(table) if len(table) else 0.0,
        "clip/token_fraction": _tokens(table) if len(table) else 0.0,
        "clip/sequence_fraction_by_mini_batch": [_sequences(part) if len(part) else 0.0 for part in parts],
        "clip/token_fraction_by_mini_batch": [_tokens(part) if len(part) else 0.0 for part in parts],
        "clip/sequence_fraction_by_length": [_sequences(quarter) for quarter in quarters],
        "clip/token_fraction_by_length": [_tokens(quarter) for quarter in quarters],
        "clip/token_fraction_by_length_by_mini_batch": [[_tokens(own) for own in part.by_length] for part in parts],
    }
    for side, sign in (("positive", 1), ("negative", -1)):
        of_side = table.where("sign", sign)
        metrics[f"clip/token_fraction_{side}"] = _tokens(of_side)
        metrics[f"clip/token_fraction_{side}_by_mini_batch"] = [_tokens(part) for part in of_side.by_mini_batch]
    return metrics


def _sequences(table: SequenceTable) -> float:
    return fraction(table.total("any_clipped"), len(table))


def _tokens(table: SequenceTable) -> float:
    return table.share("num_clipped")


def gradient_metrics(table: SequenceTable, reports: Sequence[MiniBatchReport]) -> Metrics:
    """A sequence's weight in the gradient is Σ_t |∂ per_sequence / ∂ log π_t|: of the surrogate alone."""
    noises = [report.noise for report in reports]
    measured = [noise for noise in noises if noise is not None]
    return {
        # Sums before the quotient: that of one mini-batch is a poor estimate, and can be negative.
        "gradient/signal_to_noise": fraction(sum(own.signal for own in measured), sum(own.noise for own in measured)),
        "gradient/signal_to_noise_by_mini_batch": [
            math.nan if noise is None else fraction(noise.signal, noise.noise) for noise in noises
        ],
        "gradient/share_positive": fraction(
            table.where("sign", 1).total("gradient_weight"), table.total("gradient_weight")
        ),
        "gradient/share_by_length": [
            fraction(quarter.total("gradient_weight"), table.total("gradient_weight")) for quarter in table.by_length
        ],
        "gradient/share_by_length_by_mini_batch": [_shares(part, "gradient_weight") for part in table.by_mini_batch],
        "response/token_share_by_length": _shares(table, "num_tokens"),
        "response/length_quartiles": length_quartiles(table.columns["num_tokens"]),
    }


def _shares(table: SequenceTable, name: str) -> list[float]:
    """Of a column's sum, in the quarters that the whole step is divided into."""
    parts = [quarter.total(name) for quarter in table.by_length]
    return [fraction(part, sum(parts)) for part in parts]
