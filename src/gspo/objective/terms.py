"""The settings of an objective, and the forms that its term can take: one function for each form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objective.ratio import check_name, sequence_mean, sequence_of_token
from gspo.recipe.published import LEVELS, ONLY, PUBLISHED, LengthNorm, Level, Name

_LEAST = {"clip_low": 0.0, "clip_high": 0.0, "dual_clip": 1.0, "minirl_cap": 0.0, "opsm_delta": 0.0}


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings:
    """All settings of one objective. Raises ValueError for an unknown name and for a number out of its bounds.

    Example: `SurrogateSettings.published("dapo", clip_high=0.3)` has DAPO's level (token), clip_low (0.2) and
    length_norm (mean), and clips at 1.3 in place of DAPO's 1.28.
    """

    name: Name
    level: Level  # whose importance ratio is bounded: the token's or the whole sequence's
    clip_low: float  # the range of the ratio is 1 - clip_low … 1 + clip_high; dppo, ipo, gmpo give it their own meaning
    clip_high: float
    length_norm: LengthNorm  # what divides the sum over a response's tokens
    dual_clip: float = 3.0  # the most that a ratio counts where Â < 0
    minirl_cap: float = 5.0  # the most that π_θ/π_engine counts
    sapo_temperature: tuple[float, float] = (1.0, 1.05)  # where Â > 0, where Â < 0
    opsm_delta: float | None = None  # the bound on a sequence's mean log(π_engine/π_θ); None: no sequence is dropped

    def __post_init__(self) -> None:
        check_name("surrogate", self.name, tuple(PUBLISHED))
        check_name("level", self.level, LEVELS)
        check_name("length_norm", self.length_norm, get_args(LengthNorm))
        if self.level not in PUBLISHED[self.name].levels:
            raise ValueError(f"{self.name} has no level {self.level}: {ONLY[self.name]}")
        for key, least in _LEAST.items():
            if (value := getattr(self, key)) is not None and not value >= least:
                raise ValueError(f"{key} is {value}: it must be {least:g} or more")

    @classmethod
    def published(cls, name: str = "clip", **changes: Any) -> "SurrogateSettings":
        """The settings that the objective's paper gives, with `changes`; a change to None changes nothing."""
        check_name("surrogate", name, tuple(PUBLISHED))
        published = PUBLISHED[name]  # type: ignore[index]
        changes = {key: value for key, value in changes.items() if value is not None}
        low, high = published.range(changes.setdefault("level", published.level))
        defaults = {"clip_low": low, "clip_high": high, "length_norm": published.length_norm}
        return cls(**{"name": name, **defaults, **changes})


@dataclass(frozen=True, kw_only=True)
class Units:
    """The M tokens, or whole sequences, whose importance ratios a form weighs, and the N tokens that they consist of.

    Example: of two sequences at level "sequence", ratio = [1.0002, 0.9997] and lengths = [12, 40].
    """

    ratio: Float[Tensor, "M"]  # π_θ/π_old; carries the gradient
    logprobs: Float[Tensor, "M"]  # whose gradient is that of the ratio's logarithm
    advantages: Float[Tensor, "M"]
    old_logprobs: Float[Tensor, "N"]
    sampler_logprobs: Float[Tensor, "N"] | None
    lengths: Int[Tensor, "B"]


Terms = tuple[Float[Tensor, "M"], Bool[Tensor, "M"]]  # each unit's term; whether clipping removed its gradient


def clip(units: Units, settings: SurrogateSettings) -> Terms:
    """min(ρÂ, clip(ρ, 1-ε_low, 1+ε_high) Â) (PPO, arXiv 1707.06347, Eq. 7; 2507.18071, Eq. 1, 2, 6, 14)."""
    ratio, advantages, low, high = units.ratio, units.advantages, settings.clip_low, settings.clip_high
    clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages), clipped


def dual_clip(units: Units, settings: SurrogateSettings) -> Terms:
    """PPO's term, but at least cÂ where Â < 0: a ratio above c counts as c (arXiv 1912.09729, Eq. 5)."""
    terms, clipped = clip(units, settings)
    beyond = (units.advantages < 0) & (units.ratio > settings.dual_clip)
    return torch.where(beyond, settings.dual_clip * units.advantages, terms), clipped | beyond


def cispo(units: Units, settings: SurrogateSettings) -> Terms:
    """sg[clip(ρ, 1-ε_low, 1+ε_high)] Â log π: the weight is bounded, no token is dropped (arXiv 2506.13585, Eq. 4-5).

    The paper gives no number. With ε_low = 1 there is no lower bound, as in its runs; with ε_high = 4 a ratio counts 5
    at most, as in arXiv 2510.13786.
    """
    weight = units.ratio.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return weight * units.advantages * units.logprobs, torch.zeros_like(weight, dtype=torch.bool)


def gmpo(units: Units, settings: SurrogateSettings) -> Terms:
    """exp(1/|y| Σ_t log r_t) Â, log r_t ≤ ε_high where Â > 0, ≥ -ε_low where Â < 0 (arXiv 2507.20673, Eq. 4).

    Each token of a sequence has the whole sequence's term.
    """
    log_ratio = units.logprobs - units.old_logprobs
    positive, negative = units.advantages > 0, units.advantages < 0
    bounded = torch.where(positive, log_ratio.clamp(max=settings.clip_high), log_ratio.clamp(min=-settings.clip_low))
    clipped = (positive & (log_ratio > settings.clip_high)) | (negative & (log_ratio < -settings.clip_low))
    means = sequence_mean(bounded, units.lengths).exp()
    return means[sequence_of_token(units.lengths, len(log_ratio))] * units.advantages, clipped


def sapo(units: Units, settings: SurrogateSettings) -> Terms:
    """σ(τ(ρ-1)) · 4/τ · Â: a gate that closes smoothly away from ρ = 1 (arXiv 2511.20347, Eq. 5-6)."""
    positive, negative = settings.sapo_temperature
    tau = torch.full_like(units.ratio, negative).masked_fill(units.advantages > 0, positive)
    terms = torch.sigmoid(tau * (units.ratio - 1)) * 4 / tau * units.advantages
    return terms, torch.zeros_like(terms, dtype=torch.bool)


def dppo(units: Units, settings: SurrogateSettings) -> Terms:
    """rÂ, r = π_θ/π_engine, dropped where p has moved by more than δ in Â's direction (arXiv 2602.04879, Eq. 12).

    This is the form with the total variation |p - p_engine| of the sampled token alone. Ratio and distance are measured
    from the engine, which sampled: measured from a recomputed likelihood, training collapses (Takeaway 2). Raises
    ValueError without the engine's log-likelihoods.
    """
    moved, terms = _from_sampler(units, "dppo")
    positive, negative = units.advantages > 0, units.advantages < 0
    dropped = (positive & (moved > settings.clip_high)) | (negative & (moved < -settings.clip_low))
    return torch.where(dropped, 0.0, terms), dropped


def ipo(units: Units, settings: SurrogateSettings) -> Terms:
    """rÂ, r = π_θ/π_engine, dropped where p has moved by more than δ, to whichever side (prime-rl; without a KL).

    Raises ValueError without the engine's log-likelihoods.
    """
    moved, terms = _from_sampler(units, "ipo")
    dropped = ((moved > settings.clip_high) | (moved < -settings.clip_low)) & (units.advantages != 0)
    return torch.where(dropped, 0.0, terms), dropped


def minirl(units: Units, settings: SurrogateSettings) -> Terms:
    """M sg[min(π_θ/π_engine, 5)] Â log π_θ, M = 0 where PPO would clip π_θ/π_old (arXiv 2512.01374, Eq. 7, §4.2).

    Raises ValueError without the engine's log-likelihoods.
    """
    sampler = _sampler_logprobs(units, "minirl")
    _, clipped = clip(units, settings)
    weight = (units.logprobs.detach() - sampler).exp().clamp(max=settings.minirl_cap)
    return torch.where(clipped, 0.0, weight * units.advantages * units.logprobs), clipped


def reinforce(units: Units, settings: SurrogateSettings) -> Terms:
    """Â log π_θ: no ratio, nothing clipped (Williams 1992; RLOO with the others' mean as baseline, 2402.14740)."""
    return units.advantages * units.logprobs, torch.zeros_like(units.advantages, dtype=torch.bool)


def _from_sampler(units: Units, name: str) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """Return each token's distance in probability from the engine's, without a gradient, and π_θ/π_engine · Â."""
    sampler = _sampler_logprobs(units, name)
    moved = units.logprobs.detach().exp() - sampler.exp()
    ratio = (units.logprobs - sampler).exp().where(units.advantages != 0, 1.0)  # 0 times an infinite one is NaN
    return moved, ratio * units.advantages


def _sampler_logprobs(units: Units, name: str) -> Float[Tensor, "M"]:
    if units.sampler_logprobs is None:
        raise ValueError(f"{name} weighs tokens by π_θ/π_engine: it needs sampler_logprobs")
    return units.sampler_logprobs


FORMS: Mapping[str, Callable[[Units, SurrogateSettings], Terms]] = {
    form.__name__: form for form in (clip, dual_clip, cispo, gmpo, sapo, dppo, ipo, minirl, reinforce)
}
