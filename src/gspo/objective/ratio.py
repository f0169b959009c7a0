"""Ratios of likelihoods of packed sequences: importance ratios, and weights that correct for the engine."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.recipe.published import CORRECTIONS, Correction, CorrectionLevel, Level


def sequence_of_token(lengths: Int[Tensor, "B"], num_tokens: int) -> Int[Tensor, "N"]:
    """The index in [0, B) of the sequence that each packed token belongs to."""
    # The output size is given: without it, torch would wait for the GPU to learn it.
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=num_tokens)


def sequence_mean(values: Float[Tensor, "N"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The mean over the tokens of each sequence, 1/|y_i| Σ_t; 0 for an empty sequence."""
    lengths = lengths.to(values.device, non_blocking=True)
    sums = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequence_of_token(lengths, len(values)), values) / lengths.clamp(min=1)


def importance_ratio(
    logprobs: Float[Tensor, "N"], old_logprobs: Float[Tensor, "N"], lengths: Int[Tensor, "B"], level: Level
) -> Float[Tensor, "M"]:
    """π_θ/π_old of each token or, at level "sequence", s_i: their geometric mean over a response (2507.18071, Eq. 8).

    At level "sequence_token" that of a token is sg[s_i] · π_θ/sg[π_θ] (Eq. 15).
    """
    log_ratio = logprobs - old_logprobs
    if level == "token":
        return log_ratio.exp()
    s = sequence_mean(log_ratio, lengths).exp()
    if level == "sequence":
        return s
    return s.detach()[sequence_of_token(lengths, len(logprobs))] * (logprobs - logprobs.detach()).exp()


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
    [low, high], else 0. `kpop` (AReaL): ρ, but 0 where the chances to draw the token, as those of two coins, diverge by
    more than `high` nats to either side; that of two small chances may be large. `decoupled`: ρ itself, for stale
    rollouts (arXiv 2110.00641, Eq. 10), and `ignore`: 1. `bounds` are (low, high); None does not bind. Bounds and level
    are as published unless they are given. The mean over a sequence's tokens is geometric: their product goes to 0 or
    infinity with the length. Raises ValueError for another method, for a level that the method does not have, and for
    tensors that do not fit.
    """
    check_name("method", method, [name for name in CORRECTIONS if name != "none"])
    published = CORRECTIONS[method]
    low, high = bounds or (published.low, published.high)
    if (level := level or published.levels[0]) not in published.levels:
        raise ValueError(f"{method} has no level {level!r}: {' or '.join(published.levels)}")
    check_packed(lengths, old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
    if method == "ignore":
        return torch.ones_like(old_logprobs)
    lengths = lengths.to(old_logprobs.device, non_blocking=True)
    log_ratio = (old_logprobs - sampler_logprobs).detach()
    if level == "sequence":
        log_ratio = sequence_mean(log_ratio, lengths)[sequence_of_token(lengths, len(log_ratio))]
    ratio = log_ratio.exp()
    low, high = 0.0 if low is None else low, torch.inf if high is None else high
    if method in ("tis", "decoupled"):
        return ratio.clamp(max=high)
    if method == "kpop":
        both = torch.stack([old_logprobs, sampler_logprobs]).detach().double()
        coins = both.exp().clamp(1e-8, 1 - 1e-8).unbind()
        inside = torch.maximum(_coin_divergence(*coins), _coin_divergence(*coins[::-1])) <= high
        inside &= ratio.isfinite()
    else:
        inside = (ratio >= low) & (ratio <= high)
    return torch.where(inside, torch.ones_like(ratio) if method == "geometric_mask" else ratio, 0.0)


def _coin_divergence(p: Float[Tensor, "N"], q: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """KL(p‖q) of coins that show heads with these probabilities, in nats."""
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def check_name(kind: str, name: str, names: Sequence[str]) -> None:
    """Raise ValueError, which lists the names that there are, for a name that is none of them."""
    if name not in names:
        raise ValueError(f"unknown {kind} {name!r}: {', '.join(names)}")


def check_packed(lengths: Tensor, **tensors: Tensor | None) -> None:
    """Raise ValueError, which says how to pack, for a tensor that has not one number a token of these sequences.

    Lengths on the CPU are read without a wait for the GPU.
    """
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        what = f"lengths are whole numbers, one a sequence [B], not {lengths.dtype} {list(lengths.shape)}"
        raise ValueError(f"{what}: lengths.long(), or mask.bool().sum(1) of a mask of the response's tokens")
    num_tokens = int(lengths.sum())
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() != 1:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)}: tokens are packed one after another, [N]. From padded "
                f"tensors with a mask of the response's tokens: {name}[mask], lengths = mask.sum(1)"
            )
        if tensor is not None and len(tensor) != num_tokens:
            raise ValueError(f"lengths sum to {num_tokens}, but {name} has {len(tensor)} tokens")
