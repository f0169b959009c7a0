"""From a function's name in the recipe to the function, in the trainer and in its workers alike."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gspo.errors import UserError
from gspo.recipe.callables import load_callable
from gspo.reward.builtin import exact_match, format_match, reasoning_gym
from gspo.reward.math import math

BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "format": format_match,
    "math": math,
    "reasoning_gym": reasoning_gym,
}
VERIFIERS = ("math", "reasoning_gym")  # they compute what others have written

# What built-ins take of the data by a parameter's name; their other keyword arguments are options, the recipe's alone.
_DATA = {"reasoning_gym": ("task", "entry", "task_options")}


def built_in_options(name: str) -> tuple[str, ...]:
    """The options of a built-in function; none for a function that is not built in."""
    parameters = inspect.signature(BUILT_IN[name]).parameters.values() if name in BUILT_IN else ()
    keyword_only = (parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    return tuple(parameter for parameter in keyword_only if parameter not in _DATA.get(name, ()))


def find_function(name: str) -> Callable[..., Any]:
    """The function of a built-in's name, `module:name` or `file.py:name`; UserError where there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return load_callable(name, where="reward.function")
    near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.6)
    suggestion = f"did you mean {near[0]}?" if near else f"built in: {', '.join(BUILT_IN)}."
    fix = f"{suggestion} A function of your own is module:name or file.py:name"
    if name.endswith(".py"):
        fix = f"name the function in the file: {name}:function"
    raise UserError(f"no built-in reward {name!r}", where="reward.function", fix=fix)


def prepare(name: str) -> None:
    """Import what the first answer would have to wait for."""
    if name == "math":
        assert math(["q"], [r"\boxed{(x - 1)(x + 1)}"], answer=["x^2 - 1"], seconds_per_answer=60.0) == [1.0]
    elif name == "reasoning_gym":
        import gspo.reward.gym  # noqa: F401
