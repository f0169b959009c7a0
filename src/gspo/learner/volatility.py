"""Where the routers sent the response tokens, and how much of it differs from where π_old's did (§5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from gspo.learner.micro_batching import for_each_sample
from gspo.model.policy import Policy, response_likelihood
from gspo.recipe.sections import ActorConfig
from gspo.types import Experts, Sample

_SAMPLE = 8  # sequences: two more forward passes over them


@dataclass(frozen=True, kw_only=True, eq=False)
class Activation:
    """Counts over the response tokens of some sequences, layer by layer; each token activates K experts."""

    load: Int[Tensor, "L E"]  # tokens that each expert was chosen for
    changed: Int[Tensor, "L"]  # chosen experts that are not among those the same token had before
    compared: Int[Tensor, "L"]  # chosen experts of the tokens whose experts before are known

    def __add__(self, other: "Activation") -> "Activation":
        return Activation(
            load=self.load + other.load,
            changed=self.changed + other.changed,
            compared=self.compared + other.compared,
        )


def activation(experts: Sequence[Experts], before: Sequence[Experts | None], num_experts: int) -> Activation:
    """Count the experts of each sequence, and how many are not those it had before; None: not known.

    The order in which a token's experts are named does not matter, nor do their weights.
    """
    rows = torch.cat([own.row for own in experts]).long()  # N L K
    num_layers, top_k = rows.shape[1:]
    places = torch.arange(num_layers)[:, None] * num_experts  # an expert's of each layer
    load = torch.bincount((rows + places).flatten(), minlength=num_layers * num_experts).view(num_layers, num_experts)
    pairs = [(now.row, then.row) for now, then in zip(experts, before, strict=True) if then is not None]
    if not pairs:
        none = torch.zeros(num_layers, dtype=torch.long)
        return Activation(load=load, changed=none, compared=none)
    now, then = (torch.cat(rows) for rows in zip(*pairs, strict=True))
    kept = (now[..., :, None] == then[..., None, :]).any(-1)  # N L K
    return Activation(
        load=load, changed=(~kept).sum((0, 2)), compared=torch.full((num_layers,), len(now) * top_k, dtype=torch.long)
    )


class VolatilitySample:
    """A few of the samples an optimiser step trains on, evenly spaced, and the experts they have before it."""

    def __init__(self, policy: Policy, samples: Sequence[Sample], actor: ActorConfig) -> None:
        self._policy, self._actor = policy, actor
        self._samples = samples[:: -(-len(samples) // _SAMPLE) or 1]
        self._before = self._experts()

    def change(self) -> Activation | None:
        """The experts they have now, compared with those before; None for a model without routers, or no samples."""
        if self._policy.routing is None or not self._before:
            return None
        return activation(self._experts(), self._before, self._policy.routing.num_experts)

    def _experts(self) -> Sequence[Experts]:
        if self._policy.routing is None:
            return ()
        return for_each_sample(
            lambda part: response_likelihood(self._policy, part).experts or (), self._policy, self._samples, self._actor
        )
