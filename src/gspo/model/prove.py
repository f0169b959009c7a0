"""The proof at load: whether another computation gives what the model's plain forward pass gives."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gspo.errors import UserError

# ‖a - b‖/‖b‖ up to which a and b count as equal, in the Euclidean norm, which sees a small error of all numbers, and in
# the maximum norm, which sees one wrong number. Products of other shapes round differently, at half precision visibly.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_MOST_ROUNDING = 1e-3  # a row that differs by more than this where it is beside others is no matter of rounding
_GOLDEN = (math.sqrt(5) - 1) / 2  # whose multiples modulo 1 lie far from each other
# What a model raises that is built, or called, in another way than the computation expects.
MISFITS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def probe_ids(trunk: Any, num_tokens: int = 8, *, first: int = 0) -> Int[Tensor, "N"]:
    """The ids of a proof's tokens from the `first` on: spread over the vocabulary, and all different in a large one.

    Neither its first nor its last eighth is used, where special tokens lie and rows that no text has trained: their
    states are so large that rounding alone is more than a proof allows.
    """
    embedding = trunk.get_input_embeddings().weight
    margin = len(embedding) // 8
    steps = torch.arange(first + 1, first + num_tokens + 1, dtype=torch.float64) * _GOLDEN % 1
    return (margin + (steps * (len(embedding) - 2 * margin)).long()).to(embedding.device)


def trunk_states(trunk: Any) -> Float[Tensor, "N H"]:
    """The hidden states of a proof's tokens in the trunk's plain pass."""
    states: Tensor = trunk(input_ids=probe_ids(trunk)[None], use_cache=False).last_hidden_state[0]
    return states


@torch.no_grad()
def disagreement(
    plain: Callable[[], Tensor], alternative: Callable[[], Tensor], *, beside: Callable[[], Tensor] | None = None
) -> str | None:
    """Say why `alternative` cannot stand in for `plain`; None where both agree within the tolerance of plain's dtype.

    `beside` is `plain` computed beside other rows: what differs is the model's own rounding, and is allowed twice.
    """
    try:
        expected, values = plain(), alternative()
        if values.shape != expected.shape:
            return f"it has the shape {list(values.shape)} in place of {list(expected.shape)}"
        own = expected if beside is None else beside()
        error, rounding = values.float() - expected.float(), own.float() - expected.float()
    except MISFITS as misfit:
        return one_line(misfit) or type(misfit).__name__
    tolerance, norm = TOLERANCE[expected.dtype], torch.linalg.vector_norm

    def agrees(order: float) -> bool:
        size = norm(expected.float(), order)
        most = max(tolerance * size, min(2 * norm(rounding, order), _MOST_ROUNDING * size))
        return bool(norm(error, order) <= most)

    return None if agrees(2.0) and agrees(torch.inf) else "it computes something else"  # NaN does not agree


def check_noiseless(model: Any, states: Callable[[], Tensor]) -> None:
    """Raise UserError where passes with gradients, as in training, do not always have the plain pass's states."""

    def trained(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with torch.enable_grad():
            return states().detach()

    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        reasons = [disagreement(states, partial(trained, seed)) for seed in (0, 1)]
    if any(reasons):
        problem = f"passes of {type(model).__name__} over the same tokens fail or differ: {next(filter(None, reasons))}"
        fix = "switch off what is random in its code: the ratio of the first update would not be 1"
        raise UserError(problem, where="model.path", fix=fix)


@contextmanager
def computing_in(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """Have a model compute in another precision, with its weights: one module's are copied at a time.

    What LoRA adds to them stays in float32, as in training.
    """
    own: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def convert(module: nn.Module, *_: Any) -> None:
        own[module] = [(p, p.data) for p in module.parameters(recurse=False)]
        for parameter, data in own[module]:
            parameter.data = data.to(dtype)

    def restore(module: nn.Module, *_: Any) -> None:
        for parameter, data in own.pop(module, ()):
            parameter.data = data

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if ".lora_" not in name:
                hooks.callback(module.register_forward_pre_hook(convert).remove)
                hooks.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


def one_line(error: Exception) -> str:
    """The text of an error on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
