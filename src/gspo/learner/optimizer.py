"""An optimiser with a schedule, gradient clipping, fp32 master weights, and steps that a bad gradient cannot take."""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from gspo.errors import UserError
from gspo.learner.torch_optimizers import OWN_KEYS, torch_optimizers
from gspo.model import parameters
from gspo.model.prove import one_line
from gspo.model.sharding import mesh_of_this_process
from gspo.recipe.sections import OptimizerConfig

_STEPS, _MASTER = "steps_taken", "master/"  # names, and the beginning of names, of the state's tensors
_NUMBER, _ON_CPU = "number/", "cpu/"  # the same of what is no tensor, and of tensors that lie beside a GPU's masters
MAX_SKIPPED_IN_A_ROW = 5  # updates that were not finite: then a run ends


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The report of one call of `step`.

    Example: StepReport(grad_norm=0.7, learning_rate=1e-6, applied=True)
    """

    grad_norm: float = 0.0  # before clipping
    learning_rate: float = 0.0
    applied: bool = False  # False: the gradient was not finite, the weights are unchanged


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Squared norms; their ratio, of sums over mini-batches, is the signal-to-noise ratio of one mini-batch.

    Example: Noise(signal=0.02, noise=0.31)
    """

    signal: float  # of the expected gradient, estimated without bias: by chance it may be negative
    noise: float  # of the deviation of the mini-batch's gradient from it


class Optimizer:
    """AdamW (arXiv 1711.05101), or another that the recipe names, over fp32 master weights.

    A parameter of lower precision has a float32 master: gradients of all micro-batches add up in float32 and an update
    smaller than the parameter's own precision is not lost. A float32 parameter is its own master.
    """

    def __init__(
        self, model: nn.Module, settings: OptimizerConfig, *, total_steps: int, where: str = "actor.optimizer"
    ) -> None:
        self.settings, self.total_steps, self.steps_taken = settings, total_steps, 0
        self.factor = 1.0  # of the scheduled rate
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters: dict[str, Tensor] = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for name, p in named.items()
        }
        self._rounded = {name: p for name, p in named.items() if p is not self._masters[name]}
        # Of a model that ranks share, the parameter is the master of what its passes compute with.
        computed = {name: getattr(p, "computed_in", torch.float32) for name, p in named.items()}
        self._computed = {name: dtype for name, dtype in computed.items() if dtype != torch.float32}
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_add_gradient, self._masters[name]))
            for name, p in self._rounded.items()
        ]
        self._optimizers = torch_optimizers(model, self._masters, settings, where=where)
        self._groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def learning_rate(self) -> float:
        """The rate of the next step: linear warm-up, then the schedule down to min_lr_fraction · lr, times `factor`."""
        settings, lr = self.settings, self.factor * self.settings.lr
        if self.steps_taken < settings.warmup_steps:
            return lr * (self.steps_taken + 1) / settings.warmup_steps
        progress = (self.steps_taken - settings.warmup_steps) / max(1, self.total_steps - settings.warmup_steps)
        progress = min(1.0, progress)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        remaining = {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[settings.schedule]
        return lr * (settings.min_lr_fraction + (1 - settings.min_lr_fraction) * remaining)

    def gradient(self) -> list[Tensor]:
        """Return what has been accumulated, in float32, no copies: zero where nothing has been."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def step(self, *, loss_is_finite: bool = True) -> StepReport:
        """Clip the accumulated gradient, update, and clear it; what is not finite changes nothing.

        Where there is no gradient it is zero, so that the moments decay.
        """
        norm = torch.nn.utils.get_total_norm(self.gradient())
        grad_norm, learning_rate = float(norm), self.learning_rate
        self.steps_taken += 1  # first, so that an error within leaves a count that belongs to no safe point
        applied = loss_is_finite and math.isfinite(grad_norm)
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self.settings.max_grad_norm, norm)
            for group in self._groups:
                group["lr"] = learning_rate * (group["initial_lr"] / self.settings.lr)
            for optimizer in self._optimizers:
                optimizer.step()
            with torch.no_grad():
                for name, parameter in self._rounded.items():
                    parameter.copy_(self._masters[name])
        for master in self._masters.values():
            master.grad = None
        return StepReport(grad_norm=grad_norm, learning_rate=learning_rate, applied=applied)

    def state(self) -> dict[str, Tensor]:
        """Moments, their step counts and masters by name, the optimiser's own tensors (no copies), and steps_taken."""
        state = {_STEPS: torch.tensor(self.steps_taken)}
        for name, master_state in self._states().items():
            for key, value in master_state.items():
                if isinstance(value, Tensor):
                    place = "" if value.device == self._masters[name].device else _ON_CPU
                    state[f"{place}{key}/{name}"] = value
                elif isinstance(value, int | float):
                    state[f"{_NUMBER}{key}/{name}"] = torch.from_numpy(np.array(value))
                else:
                    raise TypeError(f"its {key} is neither a tensor nor a number")
        return state | {f"{_MASTER}{name}": self._masters[name].detach() for name in (*self._rounded, *self._computed)}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put everything back to where `state` found it; the parameters themselves are the model's to restore."""
        states = self._states()
        for master_state in states.values():
            master_state.clear()  # there is none before a step
        for place, value in state.items():
            key, _, name = place.removeprefix(_NUMBER).removeprefix(_ON_CPU).partition("/")
            if place == _STEPS:
                self.steps_taken = int(value)
            elif place.startswith(_MASTER):
                self._masters[name].copy_(parameters.like(value, self._masters[name]))
            elif place.startswith(_NUMBER):
                states[name][key] = value.item()
            else:
                value = value if place.startswith(_ON_CPU) else parameters.like(value, self._masters[name])
                states[name][key] = value.clone()

    def _states(self) -> dict[str, MutableMapping[str, Any]]:
        """Return what the optimisers keep of each master, by its name."""
        owners = {
            id(p): optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        return {name: owners[id(master)].state[master] for name, master in self._masters.items()}

    def close(self) -> None:
        """Take the hooks off the parameters, so that another optimiser can have them; its masters are gone."""
        with torch.no_grad():
            for name, dtype in self._computed.items():
                self._masters[name].copy_(self._masters[name].to(dtype))
        for hook in self._hooks:
            hook.remove()


def check_optimizer(settings: OptimizerConfig, *, where: str, device: torch.device, num_ranks: int = 1) -> list[str]:
    """Have it make a step on a few numbers: UserError where that or a checkpoint fails; notes on keys of no effect.

    Where several ranks will share the parameters, it makes one on shared parameters, too. No collective.
    """
    trial, place = nn.utils.skip_init(nn.Linear, 2, 2, device=device), f"{where}.name: {settings.name}"
    try:
        optimizer = _tried(settings, trial, where)
    except UserError:
        raise
    except Exception as error:  # of any package's
        what = f"it cannot make a step that a run could resume from: {type(error).__name__}: {error}"
        raise UserError(what, where=place, fix=f"correct {where}.options, or name another") from None
    if num_ranks > 1:
        try:
            with mesh_of_this_process(device) as mesh:
                _tried(settings, fully_shard(trial, mesh=mesh), where)
        except Exception as error:
            what = f"it cannot step parameters that {num_ranks} processes share: {one_line(error)}"
            raise UserError(what, where=place, fix="name another, such as adamw, or train on one process") from None
    made = [inner_optimizer.defaults for inner_optimizer in optimizer._optimizers]
    changed = [key for key in OWN_KEYS if key != "lr" and getattr(settings, key) != getattr(OptimizerConfig(), key)]
    untaken = [key for key in changed if all(defaults.get(key) != getattr(settings, key) for defaults in made)]
    words = f"has no effect: {settings.name} takes none that is like AdamW's; see {where}.options"
    return [f"{where}.{key} {words}" for key in untaken]


def _tried(settings: OptimizerConfig, trial: nn.Module, where: str) -> Optimizer:
    """An optimiser that has made a step; TypeError, or whatever it raises itself, where none could resume from that."""
    optimizer = Optimizer(trial, settings.model_copy(update={"no_decay": ()}), total_steps=1, where=where)
    for parameter in trial.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    options = repr([{**group, "params": (), "lr": 0} for group in optimizer._groups])
    optimizer.step()
    optimizer.restore({name: parameters.whole(tensor) for name, tensor in optimizer.state().items()})
    if options != repr([{**group, "params": (), "lr": 0} for group in optimizer._groups]):
        raise TypeError("its steps change its options")
    return optimizer


def _add_gradient(master: Tensor, parameter: Tensor) -> None:
    """Move a parameter's gradient to its master's."""
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def gradient_noise(
    first: Sequence[Float[Tensor, "..."]], whole: Sequence[Float[Tensor, "..."]], fraction: float
) -> Noise:
    """Compare the gradient of the first half alone, a `fraction` of the sequences, with the whole mini-batch's.

    With ĝ₁, ĝ₂ the halves' own means over sequences, E[ĝ₁·ĝ₂] = |E g|², and f₁f₂|ĝ₁-ĝ₂|² is without bias the variance
    of the whole's (arXiv 1812.06162, Appendix A, for two halves).
    """
    signal, noise = [], []
    for half, all_of_it in zip(first, whole, strict=True):
        mean, other = half / fraction, (all_of_it - half) / (1 - fraction)
        signal.append(torch.sum(mean * other))
        noise.append(torch.sum((mean - other) ** 2) * fraction * (1 - fraction))
    sums = torch.stack([torch.stack(signal), torch.stack(noise)]).double().sum(1)
    expected, deviation = parameters.whole(sums).tolist()  # the one wait for a GPU
    return Noise(signal=expected, noise=deviation)
