"""AdamW with a schedule, gradient clipping, fp32 master weights, and steps that a bad gradient cannot take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gspo.recipe.sections import OptimizerConfig

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
MAX_SKIPPED_IN_A_ROW = 5  # updates that were not finite: then a run ends


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one call of `step` did."""

    grad_norm: float  # before clipping
    learning_rate: float
    applied: bool  # False: the gradient was not finite, the weights are unchanged


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Squared norms; their ratio, of sums over mini-batches, is the signal-to-noise ratio of one mini-batch."""

    signal: float  # of the expected gradient, estimated without bias: by chance it may be negative
    noise: float  # of the deviation of the mini-batch's gradient from it


class Optimizer:
    """AdamW over fp32 master weights (arXiv 1711.05101).

    A parameter of lower precision has a float32 master: gradients of all micro-batches add up in float32 and an update
    smaller than the parameter's own precision is not lost. A float32 parameter is its own master.
    """

    def __init__(self, model: nn.Module, settings: OptimizerConfig, *, total_steps: int) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self.steps_taken = 0
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self._masters = [p if p.dtype == torch.float32 else _master_of(p) for p in self._parameters]
        self._hooks = [
            p.register_post_accumulate_grad_hook(_adder(m))
            for p, m in zip(self._parameters, self._masters, strict=True)
            if m is not p
        ]
        own = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
        self._adamw = torch.optim.AdamW(self._masters, **own, fused=True)  # type: ignore[arg-type]

    @property
    def learning_rate(self) -> float:
        """The rate of the next step: linear warm-up, then the schedule down to min_lr_fraction · lr."""
        settings = self.settings
        if self.steps_taken < settings.warmup_steps:
            return settings.lr * (self.steps_taken + 1) / settings.warmup_steps
        progress = (self.steps_taken - settings.warmup_steps) / max(1, self.total_steps - settings.warmup_steps)
        progress = min(1.0, progress)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        remaining = {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[settings.schedule]
        return settings.lr * (settings.min_lr_fraction + (1 - settings.min_lr_fraction) * remaining)

    def step(self, *, loss_is_finite: bool = True) -> StepReport:
        """Clip the accumulated gradient, update, and clear it; what is not finite changes nothing."""
        for master in self._masters:
            if master.grad is None:  # every optimiser step is one: a gradient of zero lets the moments decay
                master.grad = torch.zeros_like(master)
        gradients = [m.grad for m in self._masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm, learning_rate = float(norm), self.learning_rate
        self.steps_taken += 1  # first, so that an error within leaves a count that belongs to no safe point
        applied = loss_is_finite and math.isfinite(grad_norm)
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self._masters, self.settings.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._publish()
        self._adamw.zero_grad(set_to_none=True)
        return StepReport(grad_norm=grad_norm, learning_rate=learning_rate, applied=applied)

    def gradient(self) -> list[Tensor]:
        """A copy of what has been accumulated, in float32."""
        return [torch.zeros_like(m) if m.grad is None else m.grad.clone() for m in self._masters]

    def noise(self, first_half: Sequence[Tensor], fraction: float) -> Noise:
        """Of the accumulated gradient, which was `first_half` after a fraction of its sequences."""
        whole = [torch.zeros_like(m) if m.grad is None else m.grad for m in self._masters]
        return gradient_noise(first_half, whole, fraction)

    def state(self) -> dict[str, Tensor]:
        """Moments, their step counts and masters by name, the optimiser's own tensors (no copies), and steps_taken."""
        state = {"steps_taken": torch.tensor(self.steps_taken)}
        for name, parameter, master in zip(self._names, self._parameters, self._masters, strict=True):
            state |= {f"{key}/{name}": value for key, value in self._adamw.state[master].items()}
            if master is not parameter:
                state[f"master/{name}"] = master.detach()
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put everything back to where `state` found it; the parameters themselves are the model's to restore."""
        self.steps_taken = int(state["steps_taken"])
        for name, parameter, master in zip(self._names, self._parameters, self._masters, strict=True):
            if master is not parameter:
                master.copy_(state[f"master/{name}"])
            keys = [key for key in _MOMENTS if f"{key}/{name}" in state]  # none before the first step that applied
            self._adamw.state[master] = {
                key: torch.empty_like(state[f"{key}/{name}"], device=master.device).copy_(state[f"{key}/{name}"])
                for key in keys
            }

    def close(self) -> None:
        """Take the hooks off the parameters, so that another optimiser can have them."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _publish(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)


def _master_of(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().float().requires_grad_()


def _adder(master: Tensor):  # type: ignore[no-untyped-def]
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return add


def gradient_noise(
    first: Sequence[Float[Tensor, "..."]], whole: Sequence[Float[Tensor, "..."]], fraction: float
) -> Noise:
    """From the gradient of the first half alone, a `fraction` of the sequences, and that of the whole mini-batch.

    With ĝ₁, ĝ₂ the halves' own means over sequences, E[ĝ₁·ĝ₂] = |E g|², and f₁f₂|ĝ₁-ĝ₂|² is without bias the variance
    of the whole's (arXiv 1812.06162, Appendix A, for two halves).
    """
    signal, noise = [], []
    for half, all_of_it in zip(first, whole, strict=True):
        mean, other = half / fraction, (all_of_it - half) / (1 - fraction)
        signal.append(torch.sum(mean * other))
        noise.append(torch.sum((mean - other) ** 2) * fraction * (1 - fraction))
    sums = torch.stack([torch.stack(signal), torch.stack(noise)]).double().sum(1).tolist()  # the one wait for a GPU
    return Noise(signal=sums[0], noise=sums[1])
