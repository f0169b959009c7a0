"""Log-likelihoods of responses under the policy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.policy.attention import take
from gspo.policy.head import token_likelihood
from gspo.policy.model import Policy
from gspo.policy.packing import Conditioned, pack


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What the policy says of N packed response tokens, in nats."""

    logprobs: Float[Tensor, "N"]
    entropy: Float[Tensor, "N"]  # of the distribution each token was drawn from; carries no gradient


def response_likelihood(policy: Policy, sequences: Sequence[Conditioned], *, temperature: float = 1.0) -> Likelihood:
    """Log-likelihood and entropy of every response token under softmax(logits / temperature), in float32.

    One forward pass over the packed sequences; the caller bounds their number (`micro_batches`).
    """
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    hidden = take(policy.hidden_states(layout), layout.predictors)
    targets = torch.cat([sequence.response_ids for sequence in sequences]).to(policy.device)
    logprobs, entropy = token_likelihood(policy.head, hidden, targets, temperature)
    return Likelihood(logprobs=logprobs, entropy=entropy)
