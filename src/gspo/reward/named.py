"""From a function's name in the recipe to the function, in the trainer and in its workers alike."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from gspo.callables import load_callable
from gspo.errors import UserError
from gspo.reward.builtin import exact_match, format_match, reasoning_gym
from gspo.reward.math import math

Function = Callable[..., Any]

BUILT_IN: Mapping[str, Function] = {
    "exact_match": exact_match,
    "format": format_match,
    "math": math,
    "reasoning_gym": reasoning_gym,
}


def find_function(name: str) -> Function:
    """The function of a built-in's name, `module:name` or `file.py:name`; UserError where there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return load_callable(name, where="reward.function")
    near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.6)
    known = f"did you mean {near[0]}?" if near else f"built in: {', '.join(BUILT_IN)}."
    mend = f"{known} A function of your own is module:name or file.py:name"
    if name.endswith(".py"):
        mend = f"name the function in the file: {name}:function"
    raise UserError(f"no built-in reward {name!r}", where="reward.function", mend=mend)
