"""Importance ratios of packed sequences."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sequence_of_token(lengths: Int[Tensor, "B"], num_tokens: int) -> Int[Tensor, "N"]:
    """The index in [0, B) of the sequence that each packed token belongs to."""
    # The output size is given: without it, torch would wait for the GPU to learn it.
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=num_tokens)


def sequence_mean(values: Float[Tensor, "N"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The mean over the tokens of each sequence, 1/|y_i| Σ_t; 0 for an empty sequence."""
    lengths = lengths.to(values.device, non_blocking=True)
    sums = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequence_of_token(lengths, len(values)), values) / lengths.clamp(min=1)


def sequence_ratio(
    logprobs: Float[Tensor, "N"], old_logprobs: Float[Tensor, "N"], lengths: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """s_i, the geometric mean of a response's token ratios π_θ/π_old (arXiv 2507.18071, Eq. 8)."""
    return sequence_mean(logprobs - old_logprobs, lengths).exp()


def check_name(kind: str, name: str, names: Sequence[str]) -> None:
    """Raises ValueError, which lists the names that there are, for a name that is none of them."""
    if name not in names:
        raise ValueError(f"unknown {kind} {name!r}: {', '.join(names)}")


def check_packed(lengths: Tensor, **tensors: Tensor | None) -> None:
    """Raises ValueError, which says how to pack, for a tensor that has not one number a token of these sequences.

    Lengths on the CPU are read without a wait for the GPU.
    """
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths are whole numbers, one a sequence [B], not {lengths.dtype} {list(lengths.shape)}")
    num_tokens = int(lengths.sum())
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() != 1:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)}: tokens are packed one after another, [N]. From padded "
                f"tensors with a mask of the response's tokens: {name}[mask], lengths = mask.sum(1)"
            )
        if tensor is not None and len(tensor) != num_tokens:
            raise ValueError(f"lengths sum to {num_tokens}, but {name} has {len(tensor)} tokens")
