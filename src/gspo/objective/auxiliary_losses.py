"""What a recipe adds to the surrogate: the divergence from a reference, the value loss, the balance of experts."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from gspo.objective.ratio import check_name, sequence_of_token

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


def value_loss(
    values: Float[Tensor, "N"], old_values: Float[Tensor, "N"], returns: Float[Tensor, "N"], clip: float | None
) -> Float[Tensor, "N"]:
    """PPO's value loss of each token, ½ max((V - R)², (V_old + clip(V - V_old, ±clip) - R)²); None clips nothing."""
    error = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return error / 2


def balance_loss(
    router_logits: Sequence[Float[Tensor, "N E"]], experts: Integer[Tensor, "N L K"], lengths: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """E/K · Σ_e f_e · P_e of each sequence, as a mean over the L layers (DeepSeek-V3, arXiv 2412.19437, Eq. 17–20).

    f_e is the share of the sequence's N_i response tokens that chose expert e (no gradient); P_e is their mean router
    probability. The loss is 1 where all experts are used alike, and E/K at most. It is computed sequence by sequence,
    because a product of means over a whole micro-batch would depend on the cut. It departs from DeepSeek-V3, which
    normalises sigmoids, in that it takes the softmax of the logits for every family.
    """
    lengths = lengths.to(experts.device, non_blocking=True)
    sequence = sequence_of_token(lengths, len(experts))
    per_layer = []
    for layer, logits in enumerate(router_logits):
        chosen = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, experts[:, layer], 1.0)
        probabilities = logits.float().softmax(-1)
        share, mean = (
            logits.new_zeros(len(lengths), logits.shape[-1], dtype=torch.float32).index_add(0, sequence, values)
            / lengths[:, None]
            for values in (chosen, probabilities)
        )
        per_layer.append((share * mean).sum(-1) * logits.shape[-1] / experts.shape[-1])
    return torch.stack(per_layer).mean(0)
