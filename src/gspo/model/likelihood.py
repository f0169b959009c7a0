"""Log-likelihoods of responses under the policy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from gspo.model.attention import take
from gspo.model.head import token_likelihood
from gspo.model.packing import Pack, TokenSequence, pack
from gspo.model.policy import Policy
from gspo.types import Experts


@dataclass(frozen=True, kw_only=True)
class ResponseStates:
    """The policy's states before N packed, scored response tokens, and where its routers sent them."""

    hidden: Float[Tensor, "N H"]
    experts: tuple[Experts, ...] | None  # of each sequence, as the routers would have it; None: no routers known
    router_logits: tuple[Float[Tensor, "N E"], ...]  # where they were asked for


@dataclass(frozen=True, kw_only=True)
class Likelihood(ResponseStates):
    """What the policy says of N packed, scored response tokens, in nats."""

    logprobs: Float[Tensor, "N"]
    entropy: Float[Tensor, "N"]  # of the distribution each token was drawn from


def response_likelihood(
    policy: Policy, sequences: Sequence[TokenSequence], *, temperature: float = 1.0, keep_router_logits: bool = False
) -> Likelihood:
    """Log-likelihood and entropy of every scored response token under softmax(logits / temperature), in float32.

    One forward pass over the packed sequences; the caller bounds their number (`micro_batches`).
    """
    states = response_states(policy, sequences, keep_router_logits=keep_router_logits)
    targets = torch.cat([sequence.scored_ids for sequence in sequences]).to(policy.device, non_blocking=True)
    logprobs, entropy = token_likelihood(policy.head, states.hidden, targets, temperature)
    return Likelihood(logprobs=logprobs, entropy=entropy, **vars(states))


def response_states(
    policy: Policy, sequences: Sequence[TokenSequence], *, keep_router_logits: bool = False
) -> ResponseStates:
    """What the policy's trunk makes of the tokens that precede the response's, in one forward pass."""
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    found = policy.run(layout, keep_router_logits=keep_router_logits)
    return ResponseStates(
        hidden=take(found.hidden, layout.predictors),
        experts=None if found.experts is None else _by_sequence(found.experts.cpu(), layout),
        router_logits=tuple(take(logits, layout.predictors) for logits in found.router_logits),
    )


def _by_sequence(experts: Integer[Tensor, "N L K"], layout: Pack) -> tuple[Experts, ...]:
    """Copies, so that what is kept of a sequence does not keep the pack; a prefix that is shared is copied once."""
    prefixes = {where.start: experts[where].clone() for where in layout.prefixes}
    pairs = zip(layout.prefixes, layout.rows, strict=True)
    return tuple(Experts(prefix=prefixes[where.start], row=experts[row].clone()) for where, row in pairs)
