"""Which reward function judges a response, and what it says of it."""

from typing import NamedTuple

from gspo.types import Failure, Score


class Verdict(NamedTuple):
    """What the judging function says of a response: its number, or why there is none."""

    function: str
    value: float | Failure


def verdict(score: Score) -> Verdict | None:
    """That of the first function, in the recipe's order, that applies to the response; None where none does.

    One that failed is taken to apply: what comes after it may be about something else, such as the response's form.
    """
    for function, part in score.parts.items():
        value = score.failures.get(function, part)
        if value is not None:
            return Verdict(function, value)
    return None


def passes(judged: Verdict | None, threshold: float) -> bool | None:
    """Whether a response passes; None where no function judges it."""
    if judged is None:
        return None
    return not isinstance(judged.value, Failure) and judged.value >= threshold
