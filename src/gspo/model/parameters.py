"""Parameters of a model that a recipe chooses by patterns of their names, such as `*.bias` or `*embed*`."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from gspo.errors import UserError, listed


def matching(patterns: Sequence[str], names: Iterable[str], *, where: str) -> set[str]:
    """The names that any of the patterns matches; UserError for a pattern that matches none of them."""
    names, chosen = list(names), set[str]()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern)}
        if not own:
            kinds = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
            raise UserError(f"{pattern!r} matches no parameter", where=where, fix=f"there are: {listed(kinds, 12)}")
        chosen |= own
    return chosen


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Take the parameters of these names out of training; a sentence for each that is frozen by another's name.

    UserError for a pattern that matches nothing, and where nothing would be left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones under each of their names
    names = matching(patterns, parameters, where="model.frozen")
    for name in names:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        fix = "leave some of them out"
        raise UserError("these patterns match every parameter: nothing is left to train", where="model.frozen", fix=fix)
    tied = {id(parameters[name]): name for name in sorted(names)}
    also = [name for name, parameter in parameters.items() if id(parameter) in tied and name not in names]
    return [f"model.frozen: {name} is {tied[id(parameters[name])]} (tied), and frozen with it" for name in also]
