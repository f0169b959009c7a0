"""Group Sequence Policy Optimization: reinforcement learning of language models on verifiable rewards.

import gspo

recipe = gspo.load_recipe("recipes/gsm8k.yaml", ["steps=10"])
outcome = gspo.train(recipe, queries=rows, reward=function)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.errors import RunError, UserError
    from gspo.loop import Outcome, train
    from gspo.recipe.load import load_recipe, make_recipe
    from gspo.recipe.schema import Recipe

__all__ = ["Outcome", "Recipe", "RunError", "UserError", "load_recipe", "make_recipe", "train"]

_MODULES = {
    "gspo.errors": ("RunError", "UserError"),
    "gspo.loop": ("Outcome", "train"),
    "gspo.recipe.load": ("load_recipe", "make_recipe"),
    "gspo.recipe.schema": ("Recipe",),
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line's help must not wait for torch.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'gspo' has no attribute {name!r}")
