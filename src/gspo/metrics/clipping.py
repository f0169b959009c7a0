"""What the clip range does: to whom, in which mini-batch, on which side."""

from collections.abc import Sequence

from gspo.learner.item import Trained, parts_of
from gspo.learner.update import MiniBatchReport
from gspo.metrics.lengths import by_length
from gspo.metrics.numbers import Metrics, fraction
from gspo.types import Batch


def clip_metrics(batch: Batch, reports: Sequence[MiniBatchReport], trained: Sequence[Trained]) -> Metrics:
    """Over the trained sequences; by mini-batch too, for the first one's ratio is 1 always."""
    parts, lengths = parts_of(trained, len(reports)), by_length(trained)
    low, high = reports[-1].clip_range
    metrics: Metrics = {
        "clip/low": low,
        "clip/high": high,
        # 0, not nothing, where nothing was trained: a diagnosis of clipping needs a number.
        "clip/sequence_fraction": _sequences(trained) if trained else 0.0,
        "clip/token_fraction": _tokens(trained) if trained else 0.0,
        "clip/sequence_fraction_by_mini_batch": [_sequences(part) if part else 0.0 for part in parts],
        "clip/token_fraction_by_mini_batch": [_tokens(part) if part else 0.0 for part in parts],
        "clip/sequence_fraction_by_length": [_sequences(part) for part in lengths],
        "clip/token_fraction_by_length": [_tokens(part) for part in lengths],
        "clip/token_fraction_by_length_by_mini_batch": [
            [_tokens([item for item in part if item.mini_batch == number]) for part in lengths]
            for number in range(len(reports))
        ],
    }
    for side, sign in (("positive", 1), ("negative", -1)):
        of_side = [[item for item in part if sign * batch.advantages[item.index] > 0] for part in parts]
        metrics[f"clip/token_fraction_{side}"] = _tokens([item for part in of_side for item in part])
        metrics[f"clip/token_fraction_{side}_by_mini_batch"] = [_tokens(part) for part in of_side]
    return metrics


def _sequences(items: Sequence[Trained]) -> float:
    return fraction(sum(item.num_clipped > 0 for item in items), len(items))


def _tokens(items: Sequence[Trained]) -> float:
    return fraction(sum(item.num_clipped for item in items), sum(item.num_tokens for item in items))
