"""The router auxiliary loss: it grows as the experts' shares of a sequence's tokens become unequal."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from gspo.objective.ratio import sequence_of_token


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
