"""What the clip range does: to whom, in which mini-batch, on which side."""

from collections.abc import Sequence

from gspo.learner.update import MiniBatchReport
from gspo.metrics.numbers import Metrics, fraction
from gspo.metrics.table import SequenceTable


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
