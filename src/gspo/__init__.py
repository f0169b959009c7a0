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
    from gspo.evaluate import Evaluation, evaluate
    from gspo.recipe.load import load_recipe, make_recipe
    from gspo.recipe.schema import Recipe
    from gspo.reward.functions import Reward
    from gspo.train import Outcome, train

__all__ = [
    "Evaluation",
    "Outcome",
    "Recipe",
    "Reward",
    "RunError",
    "UserError",
    "evaluate",
    "load_recipe",
    "make_recipe",
    "train",
]

_MODULES = {
    "gspo.errors": ("RunError", "UserError"),
    "gspo.evaluate": ("Evaluation", "evaluate"),
    "gspo.recipe.load": ("load_recipe", "make_recipe"),
    "gspo.recipe.schema": ("Recipe",),
    "gspo.reward.functions": ("Reward",),
    "gspo.train": ("Outcome", "train"),
}


class _Package(ModuleType):
    """`gspo.train` and `gspo.evaluate` are functions, though importing the modules of these names would set them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("train", "evaluate") or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line's help must not wait for torch.
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'gspo' has no attribute {name!r}")
