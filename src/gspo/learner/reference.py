"""A reference model that follows the policy: every so many steps it takes over a part of its weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gspo.errors import UserError
from gspo.model.parameters import like
from gspo.model.policy import Policy
from gspo.recipe.sections import KlConfig

_STEPS = "steps_taken"


class RefreshedReference:
    """π_ref ← α π_θ + (1 - α) π_ref of the weights, in the reference's own precision (TR-DPO, arXiv 2404.09656, Eq. 5).

    Its weights are part of every checkpoint, for no file has them.
    """

    def __init__(self, settings: KlConfig, reference: Policy, policy: Policy) -> None:
        self.settings, self.steps_taken = settings, 0  # refreshes
        self._computed_in = reference.sharding.dtype if reference.sharding else None
        self._own, self._policy = dict(reference.model.named_parameters()), dict(policy.model.named_parameters())
        shapes = [{name: p.shape for name, p in named.items()} for named in (self._own, self._policy)]
        if shapes[0] != shapes[1]:
            problem = "the reference has other weights than the policy, and cannot be refreshed from it"
            fix = "name a reference of the policy's own architecture, or set actor.kl.refresh_steps: null"
            raise UserError(problem, where=f"actor.kl.reference: {settings.reference}", fix=fix)

    @torch.no_grad()
    def step(self, num_steps: int) -> None:
        """Refresh the reference where that is due after so many steps of the run."""
        if self.settings.refresh_steps is None or num_steps % self.settings.refresh_steps:
            return
        self.steps_taken += 1  # first, so that an error within leaves a count that belongs to no safe point
        for name, parameter in self._own.items():
            dtype = self._computed_in or parameter.dtype  # ranks hold float32, and round as one process does
            before, policy = (tensor.to(dtype).float() for tensor in (parameter, self._policy[name]))
            parameter.copy_(torch.lerp(before, policy, self.settings.refresh_weight).to(dtype))

    def state(self) -> dict[str, Tensor]:
        """The reference's weights, no copies, and how often they were refreshed."""
        return {_STEPS: torch.tensor(self.steps_taken), **{name: p.detach() for name, p in self._own.items()}}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put everything back to where `state` found it."""
        self.steps_taken = int(state[_STEPS])
        for name, parameter in self._own.items():
            parameter.copy_(like(state[name], parameter))
