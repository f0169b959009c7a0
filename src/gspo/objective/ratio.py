"""Importance ratios of packed sequences."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sequence_of_token(lengths: Int[Tensor, "B"], num_tokens: int) -> Int[Tensor, "N"]:
    """The index in [0, B) of the sequence that each packed token belongs to."""
    # With its size known, a GPU need not be waited for.
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=num_tokens)


def sequence_mean(values: Float[Tensor, "N"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The mean over each sequence's own tokens, 1/|y_i| Σ_t (an empty sequence has 0)."""
    lengths = lengths.to(values.device, non_blocking=True)
    sums = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequence_of_token(lengths, len(values)), values) / lengths.clamp(min=1)


def sequence_ratio(
    logprobs: Float[Tensor, "N"], old_logprobs: Float[Tensor, "N"], lengths: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """s_i: the geometric mean of the response's token ratios π_θ/π_old (Eq. 8)."""
    return sequence_mean(logprobs - old_logprobs, lengths).exp()


def check_packed(lengths: Tensor, **tensors: Tensor) -> None:
    """ValueError, which says how to pack, where tensors are not one number a token of sequences of these lengths.

    Lengths on the CPU are looked at without waiting for a GPU.
    """
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths are whole numbers, one a sequence [B], not {lengths.dtype} {list(lengths.shape)}")
    num_tokens = int(lengths.sum())
    for name, tensor in tensors.items():
        if tensor.dim() != 1:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)}: tokens are packed one after another, [N]. From padded "
                f"tensors with a mask of the response's tokens: {name}[mask], lengths = mask.sum(1)"
            )
        if len(tensor) != num_tokens:
            raise ValueError(f"lengths sum to {num_tokens}, but {name} has {len(tensor)} tokens")
