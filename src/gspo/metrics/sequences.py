"""The numbers of the trained sequences: who is clipped, who carries the gradient, how the importance ratios spread."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import compress
from typing import Any

import torch

from gspo.metrics.numbers import Metrics, fraction, mean
from gspo.recipe.sections import ActorConfig
from gspo.types import Sample, SequenceStats

Rows = Mapping[str, Sequence[float]]  # columns by name, such as {"num_tokens": [12, 40], "sign": [1, -1], …}
Measure = Callable[[Rows], Any]

_NUMBERS = [field.name for field in fields(SequenceStats) if field.type in (int, float)]
_QUARTILES = (0.25, 0.5, 0.75, 1.0)
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_STEP, _BATCHES, _LENGTHS = ("",), ("", "_by_mini_batch"), ("_by_length",)  # what a metric's name ends in


def trained_rows(samples: Sequence[Sample]) -> Rows:
    """A row for each time that the update has trained a sample: the numbers of its stats, and five that follow.

    `sign` is the advantage's; `any_clipped` whether a token is; `correction_sum` the sum of the tokens' weights;
    `mismatch` the mean log π_old/π_engine; `quarter`, from 0, the part of the step's sequences by length.
    """
    trained = [(sample, stats) for sample in samples for stats in sample.all_stats]
    gaps = [stats.old_logprobs - sample.engine_logprobs for sample, stats in trained]
    bounds = _quantiles([stats.num_tokens for _, stats in trained], _QUARTILES)
    return {name: [getattr(stats, name) for _, stats in trained] for name in _NUMBERS} | {
        "sign": [(sample.advantage > 0) - (sample.advantage < 0) for sample, _ in trained],
        "any_clipped": [stats.num_clipped > 0 for _, stats in trained],
        "correction_sum": [stats.correction_weight * stats.num_tokens for _, stats in trained],
        "mismatch": [float(gap.double().mean()) for gap in gaps],
        # The first quarter whose bound is not below the length: equal lengths stay together, so one can be empty.
        "quarter": [bisect_left(bounds[:-1], stats.num_tokens) for _, stats in trained],
    }


def sequence_metrics(rows: Rows, num_mini_batches: int, actor: ActorConfig) -> Metrics:
    """The numbers of the step and of its parts; of the mini-batches, for the first one's ratio is 1 always."""
    by_mini_batch = [_where(rows, "mini_batch", number) for number in range(num_mini_batches)]
    by_length, *by_length_by_mini_batch = (
        [_where(part, "quarter", number) for number in range(len(_QUARTILES))] for part in (rows, *by_mini_batch)
    )
    parts = {
        "": rows,
        "_by_mini_batch": by_mini_batch,
        "_by_length": by_length,
        "_by_length_by_mini_batch": by_length_by_mini_batch,
    }
    # A sequence's weight in the gradient is Σ_t |∂ per_sequence / ∂ log π_t|: of the surrogate alone.
    weight = sum(rows["gradient_weight"])
    return {
        **{f"{name}{end}": _of_each(measure, parts[end]) for name, ends, measure in _measures(actor) for end in ends},
        **_origin_metrics(by_mini_batch, actor),
        "gradient/share_positive": fraction(sum(_where(rows, "sign", 1)["gradient_weight"]), weight),
        "gradient/share_by_length": [fraction(sum(part["gradient_weight"]), weight) for part in by_length],
        "gradient/share_by_length_by_mini_batch": [
            _shares(quarters, "gradient_weight") for quarters in by_length_by_mini_batch
        ],
        "response/token_share_by_length": _shares(by_length, "num_tokens"),
        # The longest that a response of each quarter can be.
        "response/length_quartiles": _quantiles(rows["num_tokens"], _QUARTILES),
    }


def _measures(actor: ActorConfig) -> list[tuple[str, Sequence[str], Measure]]:
    """The measures of some rows, each with its metric's name and the ends of it that say of which rows."""
    by_token, clipped = actor.importance_sampling_level == "token", partial(_share, name="num_clipped")
    measures: list[tuple[str, Sequence[str], Measure]] = [
        # 0, not nothing, where nothing was trained: a diagnosis of clipping needs a number.
        ("clip/sequence_fraction", _BATCHES, lambda rows: mean(rows["any_clipped"] or [0])),
        ("clip/sequence_fraction", _LENGTHS, lambda rows: mean(rows["any_clipped"])),
        ("clip/token_fraction", _BATCHES, lambda rows: clipped(rows) if rows["num_tokens"] else 0.0),
        ("clip/token_fraction", (*_LENGTHS, "_by_length_by_mini_batch"), clipped),
        ("clip/token_fraction_positive", _BATCHES, lambda rows: clipped(_where(rows, "sign", 1))),
        ("clip/token_fraction_negative", _BATCHES, lambda rows: clipped(_where(rows, "sign", -1))),
        # Of s_i, whatever the level.
        ("ratio/sequence_mean", _STEP, lambda rows: mean(rows["sequence_ratio"])),
        ("ratio/sequence_min", _STEP, lambda rows: min(rows["sequence_ratio"], default=math.nan)),
        ("ratio/sequence_max", _STEP, lambda rows: max(rows["sequence_ratio"], default=math.nan)),
        ("ratio/sequence_quantiles", _BATCHES, lambda rows: _quantiles(rows["sequence_ratio"], _QUANTILES)),
        ("policy/entropy", _STEP, partial(_share, name="entropy_sum")),
        ("ratio/effective_fraction", _BATCHES, partial(_effective_fraction, by_token=by_token)),
    ]
    if actor.correction != "none" or actor.opsm_delta is not None:  # what they do to the tokens
        measures.append(("correction/weight_mean", _STEP, partial(_share, name="correction_sum")))
        measures.append(("correction/masked_fraction", _BATCHES, partial(_share, name="num_masked")))
    return measures


def _of_each(measure: Measure, part: Any) -> Any:
    """The measure of some rows; a list of it where they are a list of parts."""
    return [_of_each(measure, subpart) for subpart in part] if isinstance(part, list) else measure(part)


def _where(rows: Rows, name: str, value: float) -> Rows:
    """The rows with this value in a column; there may be none."""
    chosen = [cell == value for cell in rows[name]]
    return {key: list(compress(column, chosen)) for key, column in rows.items()}


def _share(rows: Rows, name: str) -> float:
    """A number a token."""
    return fraction(sum(rows[name]), sum(rows["num_tokens"]))


def _shares(parts: Sequence[Rows], name: str) -> list[float]:
    """The shares of a column's sum in the quarters that the whole step is divided into."""
    sums = [sum(part[name]) for part in parts]
    return [fraction(quarter_sum, sum(sums)) for quarter_sum in sums]


def _effective_fraction(rows: Rows, *, by_token: bool) -> float:
    """(Σ ratio)² / (n Σ ratio²) of the ratios that the level weighs by."""
    ratios = _tensor(rows["ratio_sum" if by_token else "sequence_ratio"])
    squares = sum(rows["ratio_square_sum"]) if by_token else float(ratios.square().sum())
    return fraction(float(ratios.sum() ** 2), (sum(rows["num_tokens"]) if by_token else len(ratios)) * squares)


def _quantiles(values: Sequence[float], fractions: Sequence[float]) -> list[float]:
    """The quantiles, interpolated; NaN of nothing."""
    return torch.quantile(_tensor(values or [math.nan]), _tensor(fractions)).tolist()


def _tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _origin_metrics(parts: Sequence[Rows], actor: ActorConfig) -> Metrics:
    """The mean log π_θ/π_engine of a sequence in its two parts: π_θ/π_old is staleness, π_old/π_engine mismatch.

    Where π_old is the engine's, s is of both. Only the first mini-batch's policy is the one that sampled, so it shows
    the mismatch; of the later ones that is taken off, as if the two were independent. Of responses that are some steps
    old, the first mini-batch's has those steps in it, too.
    """
    counts = [len(rows["num_tokens"]) for rows in parts]
    # The tensor's logarithm of 0 is -∞, where math.log raises.
    moved = [_root_mean_square(_tensor(rows["sequence_ratio"]).log()) for rows in parts]
    if actor.old_logprobs == "recompute":
        stale, foreign = moved, [_root_mean_square(_tensor(rows["mismatch"])) for rows in parts]
    else:
        stale = [_without(value, moved[0]) for value in moved]
        foreign = [moved[0] if count else math.nan for count in counts]
    metrics: Metrics = {}
    for name, values in (("staleness", stale), ("mismatch", foreign)):
        # Over all mini-batches; those with nothing in them say nothing.
        squares = sum(count * value**2 for value, count in zip(values, counts, strict=True) if count)
        metrics[f"ratio/{name}_log_std"] = math.sqrt(fraction(squares, sum(counts)))
        metrics[f"ratio/{name}_log_std_by_mini_batch"] = values
    return metrics


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _without(total: float, part: float) -> float:
    """The root mean square of what remains of a sum without one of its independent parts."""
    return math.sqrt(max(0.0, total**2 - part**2)) if math.isfinite(total - part) else math.nan
