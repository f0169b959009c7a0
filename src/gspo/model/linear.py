"""Linear layers in float32 by oneDNN, where it is faster than MKL, which torch takes on CPUs (measured on AMD)."""

import os
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Compiled products are kept by their shapes, and a run meets new numbers of rows all the time: a thousand of half a
# megabyte, unless each thread is told less before its first product. Two entries a product: a pass has fewer than 32.
LIMITS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
for _name, _limit in LIMITS.items():
    os.environ.setdefault(_name, _limit)

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# The weights of a layer. With AVX-512 oneDNN is twice as fast, but its call costs 10 microseconds, more than a smaller
# product. With AVX2 alone MKL is faster by a fifth, but not where the weights are read for a few rows: heads, decoding.
_LEAST_TO_DECODE = 2**18
_LEAST = 2**24 if torch.backends.cpu.get_cpu_capability() == "AVX2" else _LEAST_TO_DECODE


def use_onednn(model: nn.Module) -> None:
    """Have a model's large linear layers compute by `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _LEAST:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(module: Any, states: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
    return linear(states, module.weight, module.bias)


def linear(
    states: Float[Tensor, "*rows K"],
    weight: Float[Tensor, "N K"],
    bias: Float[Tensor, "N"] | None = None,
    *,
    decodes: bool = False,
) -> Float[Tensor, "*rows N"]:
    """The states times the weights' transpose, plus the bias: with large weights by oneDNN, else as torch has it."""
    # Never by the number of rows: another cut into micro-batches would change more than last digits.
    least = _LEAST_TO_DECODE if decodes else _LEAST
    is_plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.numel() >= least
    is_float = states.dtype == weight.dtype == torch.float32
    if not (is_plain and is_float and states.numel() and _HAS_ONEDNN):
        return F.linear(states, weight, bias)
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # whose tensors cannot be kept for a gradient
        return _by_onednn(states, weight, bias)
    product: Tensor = _Linear.apply(states, weight, bias)
    return product


def _by_onednn(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    """The operator has no gradient of its own: it was made for inference."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states if ctx.needs_input_grad[1] else None, weight)
        return _by_onednn(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, len(weight))
        of_states = of_weight = None
        if ctx.needs_input_grad[0]:
            of_states = _by_onednn(rows, weight.T).view(*gradient.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            of_weight = _by_onednn(rows.T, states.reshape(-1, weight.shape[1]).T)
        return of_states, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
