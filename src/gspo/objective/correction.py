"""Weights that make up for the engine's likelihoods not being the policy's."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.objective.ratio import check_packed, sequence_mean, sequence_of_token
from gspo.recipe.published import CORRECTIONS, Correction, CorrectionLevel


def correction_weights(
    old_logprobs: Float[Tensor, "N"],
    sampler_logprobs: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    method: Correction,
    low: float | Literal["published"] | None = "published",
    high: float | Literal["published"] | None = "published",
    *,
    level: CorrectionLevel | None = None,
) -> Float[Tensor, "N"]:
    """A weight a token from ρ = π_old/π_sampler: of the token, or at level `sequence` its sequence's geometric mean.

    `tis`: min(ρ, high). `mis`, `icepop` (arXiv 2510.18855): ρ within [low, high], else 0.
    `geometric_mask`: 1 within [low, high], else 0. `decoupled`: ρ itself, the proximal form for stale rollouts (arXiv
    2110.00641, Eq. 10). Level and bounds are as published where none are given, the level the sequence's for
    geometric_mask, else the token's; a bound that is None does not bind. Never the product over a sequence, which goes
    to 0 or infinity with its length. The weights carry no gradient. Raises ValueError for another method, or a level
    that it does not have.
    """
    if method not in CORRECTIONS or method == "none":
        raise ValueError(f"unknown method {method!r}: {', '.join(one for one in CORRECTIONS if one != 'none')}")
    published, levels = CORRECTIONS[method], CORRECTIONS[method].levels
    low, high = (published.low if low == "published" else low), (published.high if high == "published" else high)
    if (level := level or levels[0]) not in levels:
        raise ValueError(f"{method} has no level {level!r}: {' or '.join(levels)}")
    check_packed(lengths, old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
    lengths = lengths.to(old_logprobs.device, non_blocking=True)
    log_ratio = (old_logprobs - sampler_logprobs).detach()
    if level == "sequence":
        log_ratio = sequence_mean(log_ratio, lengths)[sequence_of_token(lengths, len(log_ratio))]
    ratio = log_ratio.exp()
    if method in ("tis", "decoupled"):
        return ratio.clamp(max=high) if high is not None else ratio
    inside = torch.ones_like(ratio, dtype=torch.bool)
    if low is not None:
        inside &= ratio >= low
    if high is not None:
        inside &= ratio <= high
    return torch.where(inside, torch.ones_like(ratio) if method == "geometric_mask" else ratio, 0.0)
