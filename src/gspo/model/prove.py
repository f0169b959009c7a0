"""The proof at load: whether another computation gives what the model's plain forward pass gives."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

# ‖a - b‖/‖b‖ up to which a and b count as equal, in the Euclidean norm, which sees a small error of all numbers, and in
# the maximum norm, which sees one wrong number. Products of other shapes round differently, at half precision visibly.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# What a model raises that is built, or called, in another way than the computation expects.
MISFITS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def probe_ids(trunk: Any, num_tokens: int = 8) -> Int[Tensor, "N"]:
    """The tokens of a proof: 1, 2, …, N, within the vocabulary and on the device of the trunk's embedding."""
    embedding = trunk.get_input_embeddings().weight
    return torch.arange(1, num_tokens + 1, device=embedding.device) % len(embedding)


@torch.no_grad()
def disagreement(plain: Callable[[], Tensor], alternative: Callable[[], Tensor]) -> str | None:
    """Why `alternative` cannot stand in for `plain`; None where both agree within the tolerance of plain's dtype."""
    try:
        expected, values = plain(), alternative()
        if values.shape != expected.shape:
            return f"it has the shape {list(values.shape)} in place of {list(expected.shape)}"
        error = values.float() - expected.float()
    except MISFITS as misfit:
        return one_line(misfit) or type(misfit).__name__
    tolerance, norm = TOLERANCE[expected.dtype], torch.linalg.vector_norm
    agree = all(norm(error, order) <= tolerance * norm(expected.float(), order) for order in (2, torch.inf))
    return None if agree else "it computes something else"  # NaN does not agree


def one_line(error: Exception) -> str:
    """The text of an error on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
