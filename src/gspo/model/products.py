"""Linear layers on a CPU by oneDNN: in float32, twice as fast on AMD's CPUs as the library that torch takes there."""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

_LEAST = 2**18  # weights of a layer: the call itself costs 10 microseconds, more than a smaller product


def use_fast_products(model: nn.Module) -> None:
    """Have the linear layers of a model compute as `linear` does."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _LEAST:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(module: Any, states: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
    return linear(states, module.weight, module.bias)


def linear(
    states: Float[Tensor, "*rows K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "*rows N"]:
    """The states times the weights' transpose, plus the bias; by oneDNN where that is fast."""
    if not _is_fast(states, weight):
        return F.linear(states, weight, bias)
    if not torch.is_grad_enabled():
        return _by_onednn(states, weight, bias)
    product: Tensor = _Linear.apply(states, weight, bias)
    return product


def multiply(left: Float[Tensor, "M K"], right: Float[Tensor, "K N"]) -> Float[Tensor, "M N"]:
    """The matrix product, without a gradient; by oneDNN where that is fast."""
    return _by_onednn(left, right.T) if _is_fast(left, right) else left @ right


def _is_fast(states: Tensor, weight: Tensor) -> bool:
    # By the weights alone: another cut of the same rows must not be computed in another way.
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.numel() >= _LEAST
    return plain and states.dtype == weight.dtype == torch.float32 and states.numel() > 0 and _HAS_ONEDNN


_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _by_onednn(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    """The operator has no gradient of its own: it was made for inference."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return _by_onednn(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2).contiguous()
        of_states = _by_onednn(rows, weight.T).view_as(states) if ctx.needs_input_grad[0] else None
        of_weight = _by_onednn(rows.T, states.flatten(0, -2).T) if ctx.needs_input_grad[1] else None
        return of_states, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
