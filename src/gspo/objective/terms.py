"""The forms an objective's term can take: one function a form, of any units whose ratios it weighs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objective.ratio import sequence_mean, sequence_of_token


@dataclass(frozen=True, kw_only=True)
class Units:
    """The M things whose importance ratios are weighed: tokens, or whole sequences."""

    ratio: Float[Tensor, "M"]  # π_θ/π_old; carries the gradient
    logprobs: Float[Tensor, "M"]  # whose gradient is that of the ratio's logarithm
    old_logprobs: Float[Tensor, "M"]
    sampler_logprobs: Float[Tensor, "M"] | None
    advantages: Float[Tensor, "M"]
    lengths: Int[Tensor, "B"]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The numbers that forms bound their ratios by, in the units of each form."""

    low: float
    high: float
    dual: float = 3.0
    cap: float = 5.0  # the most that π_θ/π_engine counts in MiniRL
    temperature: tuple[float, float] = (1.0, 1.05)  # SAPO's, where Â > 0 and where Â < 0


Terms = tuple[Float[Tensor, "M"], Bool[Tensor, "M"]]  # each unit's term; where clipping has taken its gradient


def clip(units: Units, bounds: Bounds) -> Terms:
    """min(ρÂ, clip(ρ, 1-ε_low, 1+ε_high) Â) (PPO, arXiv 1707.06347, Eq. 7; 2507.18071, Eq. 1, 2, 6, 14)."""
    ratio, advantages = units.ratio, units.advantages
    clipped_ratio = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    clipped = ((advantages > 0) & (ratio > 1 + bounds.high)) | ((advantages < 0) & (ratio < 1 - bounds.low))
    return torch.minimum(ratio * advantages, clipped_ratio * advantages), clipped


def dual_clip(units: Units, bounds: Bounds) -> Terms:
    """PPO's term, and at least cÂ where Â < 0: a ratio above c weighs no more (arXiv 1912.09729, Eq. 5)."""
    terms, clipped = clip(units, bounds)
    beyond = (units.advantages < 0) & (units.ratio > bounds.dual)
    return torch.where(beyond, bounds.dual * units.advantages, terms), clipped | beyond


def cispo(units: Units, bounds: Bounds) -> Terms:
    """sg[clip(ρ, 1-ε_low, 1+ε_high)] Â log π: the weight is bounded, no token is dropped (arXiv 2506.13585, Eq. 4-5).

    The paper gives no number: with ε_low 1 there is no lower bound, as in its runs, and with ε_high 4 a ratio counts 5
    at most, as in arXiv 2510.13786.
    """
    weight = units.ratio.detach().clamp(1 - bounds.low, 1 + bounds.high)
    return weight * units.advantages * units.logprobs, torch.zeros_like(weight, dtype=torch.bool)


def gmpo(units: Units, bounds: Bounds) -> Terms:
    """exp(1/|y| Σ_t log r_t) Â, log r_t ≤ ε_high where Â > 0, ≥ -ε_low where Â < 0 (arXiv 2507.20673, Eq. 4).

    The sequence's term stands at each of its tokens.
    """
    log_ratio = units.logprobs - units.old_logprobs
    positive, negative = units.advantages > 0, units.advantages < 0
    bounded = torch.where(positive, log_ratio.clamp(max=bounds.high), log_ratio.clamp(min=-bounds.low))
    clipped = (positive & (log_ratio > bounds.high)) | (negative & (log_ratio < -bounds.low))
    means = sequence_mean(bounded, units.lengths).exp()
    return means[sequence_of_token(units.lengths, len(log_ratio))] * units.advantages, clipped


def sapo(units: Units, bounds: Bounds) -> Terms:
    """σ(τ(ρ-1)) · 4/τ · Â: a gate that closes smoothly away from ρ = 1 (arXiv 2511.20347, Eq. 5-6)."""
    positive, negative = bounds.temperature
    tau = torch.full_like(units.ratio, negative).masked_fill(units.advantages > 0, positive)
    terms = torch.sigmoid(tau * (units.ratio - 1)) * 4 / tau * units.advantages
    return terms, torch.zeros_like(terms, dtype=torch.bool)


def dppo(units: Units, bounds: Bounds) -> Terms:
    """rÂ, r = π_θ/π_engine, dropped where p has moved by more than δ in Â's direction (arXiv 2602.04879, Eq. 12).

    The form with the total variation |p - p_engine| of the sampled token, without the vocabulary's other tokens.
    Ratio and distance are from the engine, which sampled: from a likelihood computed anew training collapses
    (Takeaway 2). Raises ValueError without the engine's log-likelihoods.
    """
    sampler = _sampler_logprobs(units, "dppo")
    moved = units.logprobs.detach().exp() - sampler.exp()
    dropped = ((units.advantages > 0) & (moved > bounds.high)) | ((units.advantages < 0) & (moved < -bounds.low))
    return torch.where(dropped, 0.0, (units.logprobs - sampler).exp() * units.advantages), dropped


def minirl(units: Units, bounds: Bounds) -> Terms:
    """M sg[min(π_θ/π_engine, 5)] Â log π_θ, M = 0 where PPO would clip π_θ/π_old (arXiv 2512.01374, Eq. 7, §4.2).

    Raises ValueError without the engine's log-likelihoods.
    """
    sampler = _sampler_logprobs(units, "minirl")
    _, clipped = clip(units, bounds)
    weight = (units.logprobs.detach() - sampler).exp().clamp(max=bounds.cap)
    return torch.where(clipped, 0.0, weight * units.advantages * units.logprobs), clipped


def reinforce(units: Units, bounds: Bounds) -> Terms:
    """Â log π_θ: no ratio, nothing clipped (Williams 1992; RLOO with the others' mean as baseline, 2402.14740)."""
    return units.advantages * units.logprobs, torch.zeros_like(units.advantages, dtype=torch.bool)


def _sampler_logprobs(units: Units, name: str) -> Float[Tensor, "M"]:
    if units.sampler_logprobs is None:
        raise ValueError(f"{name} weighs tokens by π_θ/π_engine: it needs sampler_logprobs")
    return units.sampler_logprobs


FORMS: Mapping[str, Callable[[Units, Bounds], Terms]] = {
    "clip": clip,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo": dppo,
    "minirl": minirl,
    "reinforce": reinforce,
}
