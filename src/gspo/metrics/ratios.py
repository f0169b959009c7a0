"""The importance ratios of a step: how they spread, what they are made of, and how many samples they leave."""

import math
from collections.abc import Callable, Sequence

import torch

from gspo.learner.item import Trained, parts_of
from gspo.metrics.numbers import Metrics, fraction, mean
from gspo.recipe.schema import ActorConfig
from gspo.types import Rollout

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def ratio_metrics(
    rollouts: Sequence[Rollout], trained: Sequence[Trained], num_mini_batches: int, actor: ActorConfig
) -> Metrics:
    """Of s_i, whatever the level; only the effective sample is of the ratios that the level weighs by."""
    parts = parts_of(trained, num_mini_batches)
    ratios = [item.sequence_ratio for item in trained] or [math.nan]
    effective = _effective_tokens if actor.importance_sampling_level == "token" else _effective_sequences
    return {
        "ratio/sequence_mean": mean(ratios),
        "ratio/sequence_min": min(ratios),
        "ratio/sequence_max": max(ratios),
        "ratio/sequence_quantiles": _quantiles(trained),
        "ratio/sequence_quantiles_by_mini_batch": [_quantiles(part) for part in parts],
        "ratio/effective_fraction": effective(trained),
        "ratio/effective_fraction_by_mini_batch": [effective(part) for part in parts],
        **_origin_metrics(rollouts, parts, actor),
    }


def mismatch_metrics(rollouts: Sequence[Rollout], trained: Sequence[Trained]) -> Metrics:
    """Engine against π_old, token by token; exactly 0 where the engine's own log-likelihoods are π_old."""
    gaps = [(item.old_logprobs - rollouts[item.index].sampler_logprobs).abs() for item in trained]
    gap = torch.cat(gaps) if gaps else torch.zeros(1)
    return {"mismatch/logprob_gap_mean": float(gap.mean()), "mismatch/logprob_gap_max": float(gap.max())}


def correction_metrics(trained: Sequence[Trained], num_mini_batches: int, actor: ActorConfig) -> Metrics:
    """What a correction for the engine, or OPSM, does to the tokens; empty where the recipe has neither."""
    if actor.correction == "none" and actor.opsm_delta is None:
        return {}

    def masked(items: Sequence[Trained]) -> float:
        return fraction(sum(item.num_masked for item in items), sum(item.num_tokens for item in items))

    weight = sum(item.correction_weight * item.num_tokens for item in trained)
    return {
        "correction/weight_mean": fraction(weight, sum(item.num_tokens for item in trained)),
        "correction/masked_fraction": masked(trained),
        "correction/masked_fraction_by_mini_batch": [masked(part) for part in parts_of(trained, num_mini_batches)],
    }


def _quantiles(items: Sequence[Trained]) -> list[float]:
    if not items:
        return [math.nan] * len(_QUANTILES)
    ratios = torch.tensor([item.sequence_ratio for item in items], dtype=torch.float64)
    return torch.quantile(ratios, torch.tensor(_QUANTILES, dtype=torch.float64)).tolist()


def _effective_sequences(items: Sequence[Trained]) -> float:
    ratios = torch.tensor([item.sequence_ratio for item in items], dtype=torch.float64)
    return fraction(float(ratios.sum() ** 2), len(items) * float(ratios.square().sum()))


def _effective_tokens(items: Sequence[Trained]) -> float:
    total = torch.tensor([item.ratio_sum for item in items], dtype=torch.float64).sum()
    return fraction(
        float(total**2), sum(item.num_tokens for item in items) * sum(item.ratio_square_sum for item in items)
    )


def _origin_metrics(rollouts: Sequence[Rollout], parts: Sequence[Sequence[Trained]], actor: ActorConfig) -> Metrics:
    """The mean log π_θ/π_engine of a sequence in its two parts: π_θ/π_old is staleness, π_old/π_engine mismatch.

    Where π_old is the engine's, s is of both. Only the first mini-batch's policy is the one that sampled, so it shows
    the mismatch; of the later ones that is taken off, as if the two were independent.
    """

    def mismatch(item: Trained) -> float:
        return float((item.old_logprobs - rollouts[item.index].sampler_logprobs).double().mean())

    moved = [_root_mean_square(part, lambda item: _log(item.sequence_ratio)) for part in parts]
    if actor.old_logprobs == "recompute":
        stale, foreign = moved, [_root_mean_square(part, mismatch) for part in parts]
    else:
        stale = [_without(value, moved[0]) for value in moved]
        foreign = [moved[0] if part else math.nan for part in parts]
    counts = [len(part) for part in parts]
    return {
        "ratio/staleness_log_std": _pooled(stale, counts),
        "ratio/staleness_log_std_by_mini_batch": stale,
        "ratio/mismatch_log_std": _pooled(foreign, counts),
        "ratio/mismatch_log_std_by_mini_batch": foreign,
    }


def _without(total: float, part: float) -> float:
    """The root mean square of what is left of a sum without one of its independent parts."""
    return math.sqrt(max(0.0, total**2 - part**2)) if math.isfinite(total - part) else math.nan


def _pooled(values: Sequence[float], counts: Sequence[int]) -> float:
    """The root mean square over all mini-batches, from those of each; those with nothing in them say nothing."""
    squares = sum(count * value**2 for value, count in zip(values, counts, strict=True) if count)
    return math.sqrt(squares / sum(counts)) if sum(counts) else math.nan


def _log(ratio: float) -> float:
    return float(torch.tensor(ratio, dtype=torch.float64).log())  # -∞ of 0, where math.log raises


def _root_mean_square(items: Sequence[Trained], of: Callable[[Trained], float]) -> float:
    if not items:
        return math.nan
    values = torch.tensor([of(item) for item in items], dtype=torch.float64)
    return float(values.square().mean().sqrt())
