"""Log-likelihoods of responses under the policy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from gspo.policy.attention import take
from gspo.policy.head import token_likelihood
from gspo.policy.model import Policy
from gspo.policy.packing import Conditioned, Pack, pack
from gspo.records import Experts


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What the policy says of N packed response tokens, in nats, and where its routers sent them."""

    logprobs: Float[Tensor, "N"]
    entropy: Float[Tensor, "N"]  # of the distribution each token was drawn from; carries no gradient
    experts: tuple[Experts, ...] | None  # of each sequence, as the routers would have it; None: no routers known
    router_logits: tuple[Float[Tensor, "N E"], ...]  # at the tokens before the response's, where they were asked for


def response_likelihood(
    policy: Policy, sequences: Sequence[Conditioned], *, temperature: float = 1.0, keep_router_logits: bool = False
) -> Likelihood:
    """Log-likelihood and entropy of every response token under softmax(logits / temperature), in float32.

    One forward pass over the packed sequences; the caller bounds their number (`micro_batches`).
    """
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    found = policy.run(layout, keep_router_logits=keep_router_logits)
    hidden = take(found.hidden, layout.predictors)
    targets = torch.cat([sequence.response_ids for sequence in sequences]).to(policy.device)
    logprobs, entropy = token_likelihood(policy.head, hidden, targets, temperature)
    lengths = [len(sequence.response_ids) for sequence in sequences]
    return Likelihood(
        logprobs=logprobs,
        entropy=entropy,
        experts=None if found.experts is None else _by_sequence(found.experts.cpu(), layout, lengths),
        router_logits=tuple(take(logits, layout.predictors) for logits in found.router_logits),
    )


def _by_sequence(experts: Integer[Tensor, "N L K"], layout: Pack, lengths: Sequence[int]) -> tuple[Experts, ...]:
    """Copies, so that what is kept of a sequence does not keep the pack; a prefix that is shared is copied once."""
    prefixes = {where.start: experts[where].clone() for where in layout.prefixes}
    rows = experts[layout.predictors.cpu()].split(list(lengths))
    return tuple(
        Experts(prefix=prefixes[where.start], row=row.clone()) for where, row in zip(layout.prefixes, rows, strict=True)
    )
