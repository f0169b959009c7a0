"""Log-likelihoods of responses under the policy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from gspo.model.packing import take
from gspo.model.head import token_likelihood
from gspo.model.packing import Pack, TokenSequence, pack
from gspo.model.policy import Policy
from gspo.types import Experts


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """The policy's likelihoods of N packed response tokens, and the states that they come from.

    Example: for responses of 2 and 3 tokens, logprobs = [-0.1, -2.3, -0.7, -0.2, -1.6], in nats.
    """

    logprobs: Float[Tensor, "N"]  # in nats, of each response token
    entropy: Float[Tensor, "N"]  # in nats, of the distribution that each token was drawn from
    hidden: Float[Tensor, "N H"]  # the state that predicts each token
    experts: tuple[Experts, ...] | None  # of each sequence, the routers' choice; None: no routers can be watched
    router_logits: tuple[Float[Tensor, "N E"], ...]  # layer by layer, if the caller asked for them


def response_likelihood(
    policy: Policy, sequences: Sequence[TokenSequence], *, temperature: float = 1.0, keep_router_logits: bool = False
) -> Likelihood:
    """Log-likelihood and entropy of every scored response token under softmax(logits / temperature), in float32.

    One forward pass over the packed sequences; the caller bounds their number (`micro_batches`).
    """
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    output = policy.run(layout, keep_router_logits=keep_router_logits)
    hidden = take(output.hidden, layout.predictors)
    targets = torch.cat([sequence.scored_ids for sequence in sequences])
    logprobs, entropy = token_likelihood(policy.head, hidden, targets.to(policy.device, non_blocking=True), temperature)
    return Likelihood(
        logprobs=logprobs,
        entropy=entropy,
        hidden=hidden,
        experts=None if output.experts is None else _by_sequence(output.experts.cpu(), layout),
        router_logits=tuple(take(logits, layout.predictors) for logits in output.router_logits),
    )


def response_states(policy: Policy, sequences: Sequence[TokenSequence]) -> Float[Tensor, "N H"]:
    """The trunk's states that predict the N packed, scored response tokens, from one forward pass."""
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    return take(policy.run(layout).hidden, layout.predictors)


def _by_sequence(experts: Integer[Tensor, "N L K"], layout: Pack) -> tuple[Experts, ...]:
    """The experts of each sequence, copied so that the pack can be freed; a shared prefix is copied once."""
    prefixes = {span.start: experts[span].clone() for span in layout.prefixes}
    spans = zip(layout.prefixes, layout.rows, strict=True)
    return tuple(Experts(prefix=prefixes[prefix.start], row=experts[row].clone()) for prefix, row in spans)
