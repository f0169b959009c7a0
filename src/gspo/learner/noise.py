"""How much of a mini-batch's gradient is signal: two halves of its groups, compared."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Squared norms; their ratio, of sums over mini-batches, is the signal-to-noise ratio of one mini-batch."""

    signal: float  # of the expected gradient, estimated without bias: by chance it may be negative
    noise: float  # of the deviation of the mini-batch's gradient from it


def gradient_noise(
    first: Sequence[Float[Tensor, "..."]], whole: Sequence[Float[Tensor, "..."]], fraction: float
) -> Noise:
    """From the gradient of the first half alone, a `fraction` of the sequences, and that of the whole mini-batch.

    With ĝ₁, ĝ₂ the halves' own means over sequences, E[ĝ₁·ĝ₂] = |E g|², and f₁f₂|ĝ₁-ĝ₂|² is without bias the variance
    of the whole's (arXiv 1812.06162, Appendix A, for two halves).
    """
    signal, noise = [], []
    for half, all_of_it in zip(first, whole, strict=True):
        one, other = half / fraction, (all_of_it - half) / (1 - fraction)
        signal.append(torch.sum(one * other))
        noise.append(torch.sum((one - other) ** 2) * fraction * (1 - fraction))
    sums = torch.stack([torch.stack(signal), torch.stack(noise)]).double().sum(1).tolist()  # the one wait for a GPU
    return Noise(signal=sums[0], noise=sums[1])
