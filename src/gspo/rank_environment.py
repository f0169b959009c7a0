"""What the environment says of this process as one of several ranks: for what does not wait until torch is loaded."""

import os
from contextlib import suppress

from gspo.errors import UserError


def world_size() -> int:
    """Return how many processes were started together; UserError where that is no number."""
    return max(1, number_of("WORLD_SIZE", 1))


def rank_of_several() -> int | None:
    """This process's number among several; None for one alone, or where it makes no sense, as joining says."""
    with suppress(UserError):
        return number_of("RANK", 0) if world_size() > 1 else None
    return None


def is_of_others() -> bool:
    """Tell whether this process was started as another rank than 0."""
    return bool(rank_of_several())


def number_of(name: str, otherwise: int) -> int:
    """The whole number that a variable of the environment holds, where it is set; UserError where it holds none."""
    text = os.environ.get(name) or str(otherwise)
    if not text.isdecimal():
        fix = f"unset {name}, or start the ranks by --processes or torchrun, which set it"
        raise UserError(f"{name} is {text!r}, which is no whole number", where="environment", fix=fix)
    return int(text)
