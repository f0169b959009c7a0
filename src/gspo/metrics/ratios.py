"""The importance ratios of a step: how they spread, what they are made of, and how many samples they leave."""

import math
from collections.abc import Sequence

import torch

from gspo.metrics.numbers import Metrics, fraction, mean
from gspo.metrics.table import SequenceTable, quantiles
from gspo.recipe.sections import ActorConfig
from gspo.types import Sample

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def ratio_metrics(table: SequenceTable, actor: ActorConfig) -> Metrics:
    """Of s_i, whatever the level; only the effective sample is of the ratios that the level weighs by."""
    parts, ratios = table.by_mini_batch, table.columns["sequence_ratio"] or [math.nan]
    effective = _effective_tokens if actor.importance_sampling_level == "token" else _effective_sequences
    return {
        "ratio/sequence_mean": mean(ratios),
        "ratio/sequence_min": min(ratios),
        "ratio/sequence_max": max(ratios),
        "ratio/sequence_quantiles": quantiles(table.columns["sequence_ratio"], _QUANTILES),
        "ratio/sequence_quantiles_by_mini_batch": [
            quantiles(part.columns["sequence_ratio"], _QUANTILES) for part in parts
        ],
        "ratio/effective_fraction": effective(table),
        "ratio/effective_fraction_by_mini_batch": [effective(part) for part in parts],
        **_origin_metrics(parts, actor),
    }


def mismatch_metrics(samples: Sequence[Sample]) -> Metrics:
    """Engine against π_old, token by token; exactly 0 where the engine's own log-likelihoods are π_old."""
    trained = [(sample, sample.stats) for sample in samples if sample.stats is not None]
    gaps = [(stats.old_logprobs - sample.sampler_logprobs).abs() for sample, stats in trained]
    gap = torch.cat(gaps) if gaps else torch.zeros(1)
    return {"mismatch/logprob_gap_mean": float(gap.mean()), "mismatch/logprob_gap_max": float(gap.max())}


def correction_metrics(table: SequenceTable, actor: ActorConfig) -> Metrics:
    """What a correction for the engine, or OPSM, does to the tokens; empty where the recipe has neither."""
    if actor.correction == "none" and actor.opsm_delta is None:
        return {}
    return {
        "correction/weight_mean": table.share("correction_sum"),
        "correction/masked_fraction": table.share("num_masked"),
        "correction/masked_fraction_by_mini_batch": [part.share("num_masked") for part in table.by_mini_batch],
    }


def _effective_sequences(table: SequenceTable) -> float:
    ratios = torch.tensor(table.columns["sequence_ratio"], dtype=torch.float64)
    return fraction(float(ratios.sum() ** 2), len(table) * float(ratios.square().sum()))


def _effective_tokens(table: SequenceTable) -> float:
    total = torch.tensor(table.columns["ratio_sum"], dtype=torch.float64).sum()
    return fraction(float(total**2), table.total("num_tokens") * table.total("ratio_square_sum"))


def _origin_metrics(parts: Sequence[SequenceTable], actor: ActorConfig) -> Metrics:
    """The mean log π_θ/π_engine of a sequence in its two parts: π_θ/π_old is staleness, π_old/π_engine mismatch.

    Where π_old is the engine's, s is of both. Only the first mini-batch's policy is the one that sampled, so it shows
    the mismatch; of the later ones that is taken off, as if the two were independent.
    """
    # The tensor's logarithm of 0 is -∞, where math.log raises.
    ratios = [torch.tensor(part.columns["sequence_ratio"], dtype=torch.float64) for part in parts]
    moved = [_root_mean_square(own.log().tolist()) for own in ratios]
    if actor.old_logprobs == "recompute":
        stale, foreign = moved, [_root_mean_square(part.columns["mismatch"]) for part in parts]
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


def _without(total: float, part: float) -> float:
    """The root mean square of what remains of a sum without one of its independent parts."""
    return math.sqrt(max(0.0, total**2 - part**2)) if math.isfinite(total - part) else math.nan


def _pooled(values: Sequence[float], counts: Sequence[int]) -> float:
    """The root mean square over all mini-batches, from those of each; those with nothing in them say nothing."""
    squares = sum(count * value**2 for value, count in zip(values, counts, strict=True) if count)
    return math.sqrt(squares / sum(counts)) if sum(counts) else math.nan


def _root_mean_square(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).square().mean().sqrt()) if values else math.nan
