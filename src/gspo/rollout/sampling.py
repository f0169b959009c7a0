"""Drawing the next token of every row."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.config import Rollout as Sampling


def sample(
    logits: Float[Tensor, "R V"], sampling: Sampling, generator: torch.Generator
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """Draw a token a row, from the top-k / top-p part where asked; its log-likelihood is that of the whole softmax."""
    log_probabilities = (logits / sampling.temperature).log_softmax(-1)
    kept = _truncate(log_probabilities, sampling)
    # One uniform number a row through the cumulated probabilities, whatever they sum to; noise for every token of a
    # large vocabulary would cost more than the model.
    cumulated = kept.exp().cumsum(-1, dtype=torch.float64)  # float32 would lose the small ones of a large vocabulary
    uniform = torch.rand(len(logits), 1, generator=generator, device=logits.device, dtype=torch.float64)
    uniform = uniform * cumulated[:, -1:]
    token = torch.searchsorted(cumulated, uniform, right=True).clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], log_probabilities.gather(-1, token)[:, 0]


def _truncate(log_probabilities: Float[Tensor, "R V"], sampling: Sampling) -> Float[Tensor, "R V"]:
    """-inf outside the top k tokens and outside the smallest set of probability ≥ top_p."""
    if 0 < sampling.top_k < log_probabilities.shape[-1]:
        threshold = log_probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        log_probabilities = log_probabilities.masked_fill(log_probabilities < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = log_probabilities.softmax(-1).sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p  # the mass before the token already suffices
        outside = torch.zeros_like(outside).scatter(-1, order, outside)
        log_probabilities = log_probabilities.masked_fill(outside, -torch.inf)
    return log_probabilities
