"""Group Sequence Policy Optimization: reinforcement learning of language models on verifiable rewards.

import gspo

recipe = gspo.load_recipe("recipes/gsm8k.yaml", ["steps=10"])
outcome = gspo.train(recipe, queries=rows, reward=function)
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.errors import RunError, UserError
    from gspo.recipe.load import load_recipe, make_recipe
    from gspo.recipe.schema import Recipe
    from gspo.train import Outcome, train

__all__ = ["Outcome", "Recipe", "RunError", "UserError", "load_recipe", "make_recipe", "train"]

_HOMES = {
    "train": "gspo.train",
    "Outcome": "gspo.train",
    "Recipe": "gspo.recipe.schema",
    "RunError": "gspo.errors",
    "UserError": "gspo.errors",
    "load_recipe": "gspo.recipe.load",
    "make_recipe": "gspo.recipe.load",
}


class _Package(ModuleType):
    """`gspo.train` is the function, though importing the module of that name would set it to the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line's help must not wait for torch.
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gspo' has no attribute {name!r}")
