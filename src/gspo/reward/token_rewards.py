"""From what a function says of a response to the rewards that its tokens earn."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.recipe.schema import Per
from gspo.types import Sample


def to_token_rewards(value: float | Sequence[float], per: Per, sample: Sample) -> float | Float[Tensor, "W"] | str:
    """One reward for all, or one for each token, in float64: a segment's is earned by its last token.

    A text says why the value is not of the right form.
    """
    if per == "response":
        return value if isinstance(value, float) else f"it returns {repr(value)[:80]} for a completion"
    expected = sample.num_written if per == "token" else len(sample.segments)
    if isinstance(value, float) and expected == 1:  # an array of one number comes as that number
        value = [value]
    if isinstance(value, float):
        return f"it returns {value!r} for a completion where a list is due, with a number for each {per}"
    if len(value) != expected:
        return f"it returns {_count(len(value), 'number')} for a response of {_count(expected, per)}"
    numbers = torch.tensor(value, dtype=torch.float64)
    if per == "token":
        return numbers
    last_tokens = (torch.tensor(sample.segments).cumsum(0) - 1).clamp(min=0)  # one without tokens: the one before
    return numbers.new_zeros(sample.num_written).index_add_(0, last_tokens, numbers)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
