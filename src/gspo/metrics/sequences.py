"""The numbers of the trained sequences: who is clipped, who carries the gradient, how the importance ratios spread."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from gspo.metrics.numbers import Metrics, fraction, mean
from gspo.metrics.table import QUARTILES, SequenceTable, quantiles
from gspo.recipe.sections import ActorConfig

Measure = Callable[[SequenceTable], float | list[float]]
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


# By names, whose ends say of which rows: those of the step, of each mini-batch, or of each quarter by length.
_MEASURES: Mapping[str, Measure] = {
    # 0, not nothing, where nothing was trained: a diagnosis of clipping needs a number.
    """clip/sequence_fraction clip/sequence_fraction_by_mini_batch
    """: lambda rows: mean(rows.columns["any_clipped"]) if len(rows) else 0.0,
    "clip/sequence_fraction_by_length": lambda rows: mean(rows.columns["any_clipped"]),
    """clip/token_fraction clip/token_fraction_by_mini_batch
    """: lambda rows: rows.share("num_clipped") if len(rows) else 0.0,
    """clip/token_fraction_by_length clip/token_fraction_by_length_by_mini_batch
    """: lambda rows: rows.share("num_clipped"),
    """clip/token_fraction_positive clip/token_fraction_positive_by_mini_batch
    """: lambda rows: rows.where("sign", 1).share("num_clipped"),
    """clip/token_fraction_negative clip/token_fraction_negative_by_mini_batch
    """: lambda rows: rows.where("sign", -1).share("num_clipped"),
    # Of s_i, whatever the level.
    "ratio/sequence_mean": lambda rows: mean(rows.columns["sequence_ratio"]),
    "ratio/sequence_min": lambda rows: min(rows.columns["sequence_ratio"], default=math.nan),
    "ratio/sequence_max": lambda rows: max(rows.columns["sequence_ratio"], default=math.nan),
    """ratio/sequence_quantiles ratio/sequence_quantiles_by_mini_batch
    """: lambda rows: quantiles(rows.columns["sequence_ratio"], _QUANTILES),
    "policy/entropy": lambda rows: rows.share("entropy_sum"),
}
# What a correction for the engine, or OPSM, does to the tokens.
_CORRECTION: Mapping[str, Measure] = {
    "correction/weight_mean": lambda rows: rows.share("correction_sum"),
    "correction/masked_fraction correction/masked_fraction_by_mini_batch": lambda rows: rows.share("num_masked"),
}


def sequence_metrics(table: SequenceTable, actor: ActorConfig) -> Metrics:
    """Of the step and of its mini-batches, for the first one's ratio is 1 always."""
    by_token = actor.importance_sampling_level == "token"
    measures: dict[str, Measure] = {
        **_MEASURES,
        """ratio/effective_fraction ratio/effective_fraction_by_mini_batch
        """: partial(_effective_fraction, by_token=by_token),
        **(_CORRECTION if actor.correction != "none" or actor.opsm_delta is not None else {}),
    }
    # A sequence's weight in the gradient is Σ_t |∂ per_sequence / ∂ log π_t|: of the surrogate alone.
    weight = table.total("gradient_weight")
    return {
        **{name: table.measure(name, measure) for names, measure in measures.items() for name in names.split()},
        **_origin_metrics(table.by_mini_batch, actor),
        "gradient/share_positive": fraction(table.where("sign", 1).total("gradient_weight"), weight),
        "gradient/share_by_length": [fraction(part.total("gradient_weight"), weight) for part in table.by_length],
        "gradient/share_by_length_by_mini_batch": [_shares(part, "gradient_weight") for part in table.by_mini_batch],
        "response/token_share_by_length": _shares(table, "num_tokens"),
        # The longest that a response of each quarter can be.
        "response/length_quartiles": quantiles(table.columns["num_tokens"], QUARTILES),
    }


def _effective_fraction(rows: SequenceTable, *, by_token: bool) -> float:
    """(Σ ratio)² / (n Σ ratio²) of the ratios that the level weighs by."""
    ratios = rows.tensor("ratio_sum" if by_token else "sequence_ratio")
    squares = rows.total("ratio_square_sum") if by_token else float(ratios.square().sum())
    return fraction(float(ratios.sum() ** 2), (rows.total("num_tokens") if by_token else len(rows)) * squares)


def _shares(rows: SequenceTable, name: str) -> list[float]:
    """Of a column's sum, in the quarters that the whole step is divided into."""
    parts = [quarter.total(name) for quarter in rows.by_length]
    return [fraction(part, sum(parts)) for part in parts]


def _origin_metrics(parts: Sequence[SequenceTable], actor: ActorConfig) -> Metrics:
    """The mean log π_θ/π_engine of a sequence in its two parts: π_θ/π_old is staleness, π_old/π_engine mismatch.

    Where π_old is the engine's, s is of both. Only the first mini-batch's policy is the one that sampled, so it shows
    the mismatch; of the later ones that is taken off, as if the two were independent.
    """
    # The tensor's logarithm of 0 is -∞, where math.log raises.
    moved = [_root_mean_square(part.tensor("sequence_ratio").log()) for part in parts]
    if actor.old_logprobs == "recompute":
        stale, foreign = moved, [_root_mean_square(part.tensor("mismatch")) for part in parts]
    else:
        stale = [_without(value, moved[0]) for value in moved]
        foreign = [moved[0] if len(part) else math.nan for part in parts]
    counts = [len(part) for part in parts]
    return {
        "ratio/staleness_log_std": _pooled(stale, counts),
        "ratio/staleness_log_std_by_mini_batch": stale,
        "ratio/mismatch_log_std": _pooled(foreign, counts),
        "ratio/mismatch_log_std_by_mini_batch": foreign,
    }


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _without(total: float, part: float) -> float:
    """The root mean square of what remains of a sum without one of its independent parts."""
    return math.sqrt(max(0.0, total**2 - part**2)) if math.isfinite(total - part) else math.nan


def _pooled(values: Sequence[float], counts: Sequence[int]) -> float:
    """The root mean square over all mini-batches, from those of each; those with nothing in them say nothing."""
    squares = sum(count * value**2 for value, count in zip(values, counts, strict=True) if count)
    return math.sqrt(squares / sum(counts)) if sum(counts) else math.nan
