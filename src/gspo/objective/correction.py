"""Weights that correct for the engine's likelihoods, which are not exactly the policy's."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.objective.ratio import check_name, check_packed, sequence_mean, sequence_of_token
from gspo.recipe.published import CORRECTIONS, Correction, CorrectionLevel


def correction_weights(
    old_logprobs: Float[Tensor, "N"],
    sampler_logprobs: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    method: Correction,
    bounds: tuple[float | None, float | None] | None = None,
    *,
    level: CorrectionLevel | None = None,
) -> Float[Tensor, "N"]:
    """A weight a token, without a gradient, from ρ = π_old/π_sampler of the token or, at level "sequence", its mean.

    `tis`: min(ρ, high). `mis`, `icepop` (arXiv 2510.18855): ρ within [low, high], else 0. `geometric_mask`: 1 within
    [low, high], else 0. `decoupled`: ρ itself, the proximal form for stale rollouts (arXiv 2110.00641, Eq. 10).
    `bounds` are (low, high); a bound of None does not bind. Bounds and level are as published unless they are given.
    The mean over a sequence's tokens is geometric: their product goes to 0 or infinity with the length. Raises
    ValueError for another method, for a level that the method does not have, and for tensors that do not fit.
    """
    check_name("method", method, [name for name in CORRECTIONS if name != "none"])
    published = CORRECTIONS[method]
    low, high = bounds or (published.low, published.high)
    if (level := level or published.levels[0]) not in published.levels:
        raise ValueError(f"{method} has no level {level!r}: {' or '.join(published.levels)}")
    check_packed(lengths, old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
    lengths = lengths.to(old_logprobs.device, non_blocking=True)
    log_ratio = (old_logprobs - sampler_logprobs).detach()
    if level == "sequence":
        log_ratio = sequence_mean(log_ratio, lengths)[sequence_of_token(lengths, len(log_ratio))]
    ratio = log_ratio.exp()
    low, high = 0.0 if low is None else low, torch.inf if high is None else high
    if method in ("tis", "decoupled"):
        return ratio.clamp(max=high)
    inside = (ratio >= low) & (ratio <= high)
    return torch.where(inside, torch.ones_like(ratio) if method == "geometric_mask" else ratio, 0.0)
