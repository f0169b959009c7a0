"""Weights that make up for the engine's likelihoods not being the policy's."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.objective.ratio import sequence_mean, sequence_of_token
from gspo.published import Correction


def correction_weights(
    old_logprobs: Float[Tensor, "N"],
    sampler_logprobs: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    method: Correction,
    low: float | None = None,
    high: float | None = None,
) -> Float[Tensor, "N"]:
    """A weight a token from ρ = π_old/π_sampler, the geometric mean over its sequence (of a token for icepop).

    `tis`: min(ρ, high). `mis`: ρ within [low, high], else 0. `icepop`: as mis, token by token (arXiv 2510.18855).
    `geometric_mask`: 1 within [low, high], else 0. `decoupled`: ρ itself, the proximal form for stale rollouts (arXiv
    2110.00641). Never the product over a sequence, which goes to 0 or infinity with its length. Departs from TIS and
    MIS as first written in averaging over the sequence. None: no bound. The weights carry no gradient.
    """
    log_ratio = (old_logprobs - sampler_logprobs).detach()
    if method != "icepop":
        log_ratio = sequence_mean(log_ratio, lengths)[sequence_of_token(lengths)]
    ratio = log_ratio.exp()
    if method in ("tis", "decoupled"):
        return ratio.clamp(max=high) if high is not None else ratio
    inside = torch.ones_like(ratio, dtype=torch.bool)
    if low is not None:
        inside &= ratio >= low
    if high is not None:
        inside &= ratio <= high
    return torch.where(inside, torch.ones_like(ratio) if method == "geometric_mask" else ratio, 0.0)
