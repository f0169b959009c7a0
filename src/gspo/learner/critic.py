"""The value model of PPO: a linear head on hidden states of its own, or on the policy's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from gspo.learner.optimizer import Optimizer
from gspo.model.packing import TokenSequence
from gspo.model.parameters import like
from gspo.model.policy import Policy, response_states
from gspo.model.sharding import shard_beside
from gspo.recipe.sections import CriticConfig

_OPTIMIZER = "optimizer."  # the beginning of its optimizer's tensors' names


class Critic:
    """V of the state before each response token, in the units of the reward."""

    def __init__(self, settings: CriticConfig, policy: Policy, own_policy: Policy | None, *, total_steps: int) -> None:
        """`own_policy`: a second one, which takes the policy's weights; None: the critic reads the policy's states."""
        self.settings, self._policy, self._own = settings, policy, own_policy
        # In float32; without a draw, which a resumed run would make once more, and without an opinion.
        self._head = nn.utils.skip_init(nn.Linear, policy.head.weight.shape[1], 1, device=policy.device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        shard_beside(policy.model, self._head)
        self._parts = nn.ModuleDict({"head": self._head})
        if own_policy is not None:
            own_policy.model.load_state_dict(policy.model.state_dict())
            self._parts["trunk"] = own_policy.trunk
        self.optimizer = Optimizer(self._parts, settings.optimizer, total_steps=total_steps, where="critic.optimizer")

    @property
    def coefficient(self) -> float:
        """The value loss's coefficient: in a trunk of its own it would only scale the gradient, which Adam undoes."""
        return self.settings.coefficient if self._own is None else 1.0

    def values(
        self, sequences: Sequence[TokenSequence], hidden: Float[Tensor, "N H"] | None = None
    ) -> Float[Tensor, "N"]:
        """V before each response token; `hidden` spares a shared trunk its pass: the policy's states there."""
        if self._own is not None:
            free = [replace(sequence, experts=None) for sequence in sequences]  # its routers choose for themselves
            hidden = response_states(self._own, free)
        elif hidden is None:
            hidden = response_states(self._policy, sequences)
        values: Tensor = self._head(hidden.float())[:, 0]
        return values

    def state(self) -> dict[str, Tensor]:
        """Return everything that a resumed run needs of it, by name."""
        optimizer_state = {f"{_OPTIMIZER}{name}": tensor for name, tensor in self.optimizer.state().items()}
        return {**self._parts.state_dict(), **optimizer_state}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put everything back to what `state` gave."""
        optimizer_state = {name.removeprefix(_OPTIMIZER): state[name] for name in state if name.startswith(_OPTIMIZER)}
        parts = {name: like(state[name], now) for name, now in self._parts.state_dict().items()}
        self._parts.load_state_dict(parts)
        self.optimizer.restore(optimizer_state)
