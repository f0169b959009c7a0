"""Importance ratios of packed sequences."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sequence_of_token(lengths: Int[Tensor, "B"]) -> Int[Tensor, "N"]:
    """The index in [0, B) of the sequence that each packed token belongs to."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def sequence_mean(values: Float[Tensor, "N"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The mean over each sequence's own tokens, 1/|y_i| Σ_t (an empty sequence has 0)."""
    sums = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequence_of_token(lengths), values) / lengths.clamp(min=1)


def sequence_ratio(
    logprobs: Float[Tensor, "N"], old_logprobs: Float[Tensor, "N"], lengths: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """s_i: the geometric mean of the response's token ratios π_θ/π_old (Eq. 8)."""
    return sequence_mean(logprobs - old_logprobs, lengths).exp()
