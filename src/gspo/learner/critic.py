"""The value model of PPO: a linear head on hidden states of its own, or on the policy's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from gspo.learner.optimizer import Optimizer
from gspo.model.likelihood import response_states
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.schema import CriticConfig

_TRUNK, _HEAD, _OPTIMIZER = "trunk.", "head.", "optimizer."  # the beginnings of its tensors' names


class Critic:
    """V of the state before each response token, in the units of the reward."""

    def __init__(self, settings: CriticConfig, policy: Policy, own: Policy | None, *, total_steps: int) -> None:
        """`own`: a second model, which takes the policy's weights; None: the critic reads the policy's states."""
        self.settings, self._own = settings, own
        # In float32; without a draw, which a resumed run would make once more, and without an opinion.
        self._head = nn.utils.skip_init(nn.Linear, policy.head.weight.shape[1], 1, device=policy.device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        parts = nn.ModuleDict({"head": self._head})
        if own is not None:
            own.model.load_state_dict(policy.model.state_dict())
            parts["trunk"] = own.trunk
        self.optimizer = Optimizer(parts, settings.optimizer, total_steps=total_steps)

    @property
    def coefficient(self) -> float:
        """Of the value loss: in a trunk of its own it would only scale the gradient, which Adam undoes."""
        return self.settings.coefficient if self._own is None else 1.0

    def values(self, sequences: Sequence[TokenSequence], hidden: Float[Tensor, "N H"] | None) -> Float[Tensor, "N"]:
        """V before each response token; `hidden` are the policy's states there, which only a shared trunk reads."""
        states = hidden
        if self._own is not None:
            chosen = [replace(one, experts=None) for one in sequences]  # its routers choose for themselves
            states = response_states(self._own, chosen)
        assert states is not None
        values: Tensor = self._head(states.float())[:, 0]
        return values

    def needs_policy(self) -> bool:
        """Whether values are read off the policy's own states."""
        return self._own is None

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs of it, by name."""
        found = {f"{_HEAD}{name}": tensor.detach() for name, tensor in self._head.state_dict().items()}
        if self._own is not None:
            found |= {f"{_TRUNK}{name}": tensor for name, tensor in self._own.trunk.state_dict().items()}
        return found | {f"{_OPTIMIZER}{name}": tensor for name, tensor in self.optimizer.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put everything back to where `state` found it."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

        self._head.load_state_dict(under(_HEAD))
        if self._own is not None:
            self._own.trunk.load_state_dict(under(_TRUNK))
        self.optimizer.restore(under(_OPTIMIZER))
