"""Where the routers sent the response tokens, and how much of it differs from where π_old's did (§5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from gspo.learner.micro_batching import Learner, for_each_sample
from gspo.model.policy import response_likelihood
from gspo.model.routing import Routing
from gspo.types import Experts, Sample

_WATCHED = 8  # sequences: two more forward passes over them


@dataclass(frozen=True, kw_only=True, eq=False)
class Activation:
    """Counts over the response tokens of some sequences, layer by layer; each token activates K experts.

    Example: of 9 tokens, 2 of 4 experts each, in one layer: load = [[9, 0, 4, 5]], changed = [3], compared = [18].
    """

    load: Int[Tensor, "L E"]  # tokens that each expert was chosen for
    changed: Int[Tensor, "L"]  # chosen experts that are not among those the same token had before
    compared: Int[Tensor, "L"]  # chosen experts of the tokens whose experts before are known

    def __add__(self, other: "Activation") -> "Activation":
        return Activation(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})


def activation(
    routing: Routing | None, experts: Sequence[Experts], before: Sequence[Experts | None]
) -> Activation | None:
    """Count the experts of each sequence, and how many are not those it had before; None: not known.

    The order in which a token's experts are named does not matter, nor do their weights. None of a model without
    routers, and of no sequences.
    """
    if routing is None or not experts:
        return None
    rows = torch.cat([sequence_experts.row for sequence_experts in experts]).long()  # N L K
    num_layers, num_experts = rows.shape[1], routing.num_experts
    first = torch.arange(num_layers)[:, None] * num_experts  # number of each layer's first expert, among all layers'
    load = torch.bincount((rows + first).flatten(), minlength=num_layers * num_experts).view(num_layers, num_experts)
    pairs = [(now.row, then.row) for now, then in zip(experts, before, strict=True) if then is not None]
    nothing = experts[0].row[:0]
    now, then = (torch.cat(rows) for rows in zip((nothing, nothing), *pairs, strict=True))
    moved = (now[..., :, None] != then[..., None, :]).all(-1)  # N L K
    return Activation(load=load, changed=moved.sum((0, 2)), compared=torch.ones_like(moved).sum((0, 2)))


def watched_experts(learner: Learner, samples: Sequence[Sample]) -> Sequence[Experts]:
    """The experts that a few of the samples, evenly spaced, have now; none of a model without routers."""
    if learner.policy.routing is None:
        return ()
    few = samples[:: -(-len(samples) // _WATCHED) or 1]
    return for_each_sample(learner, few, lambda part: response_likelihood(learner.policy, part).experts or ())
