"""Estimates of the KL divergence from a reference model at sampled tokens."""

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from gspo.objective.ratio import check_name

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"], estimator: Estimator
) -> Float[Tensor, "N"]:
    """KL(π_θ‖π_ref) estimated at each token drawn from π_θ, in nats (Schulman 2020, joschu.net/blog/kl-approx.html).

    With l = log π_θ/π_ref: k1 = l, k2 = l²/2, k3 = e^-l - 1 + l. The values of k1 and k3 are unbiased. Of their
    gradients as a loss, only that of k2 is the gradient of the KL (arXiv 2506.09477): that of k1 is 0 in the mean, and
    that of k3 belongs to the reverse KL. Raises ValueError for another estimator and for shapes that differ.
    """
    check_name("estimator", estimator, get_args(Estimator))
    if logprobs.shape != reference_logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(reference_logprobs.shape)}"
        raise ValueError(f"logprobs and reference_logprobs are of the same tokens, not of shapes {shapes}")
    gap = logprobs - reference_logprobs
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap**2 / 2
    return (-gap).exp() - 1 + gap
