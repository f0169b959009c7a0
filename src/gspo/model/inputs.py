"""What is known of a recipe's model without its weights: its configuration and its tokenizer."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from gspo.errors import UserError
from gspo.model.load import (
    check_tokens,
    empty_model,
    load_config,
    make_tokenizer,
    max_positions,
    models_beside,
    weights_left_out,
)
from gspo.model.neighbours import check_positions
from gspo.model.routing import check_declared
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """A model before its weights are loaded.

    Example: read_model(recipe).config.model_type == "qwen3"
    """

    config: Any  # as transformers has it
    tokenizer: Any
    notes: Sequence[str]  # what one would not expect

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the architecture declares, in tokens."""
        return max_positions(self.config)


def read_model(recipe: Recipe, texts: Iterable[str] = ()) -> ModelInputs:
    """Read the configuration and the tokenizer; a tokenizer that is fitted can write the texts.

    UserError where the actor's settings, or a reference or teacher, do not fit them.
    """
    quiet_transformers()
    config = load_config(recipe.model)
    check_declared(recipe.actor, config)
    tokenizer = make_tokenizer(recipe.model, texts)
    for where, path in models_beside(recipe).items():
        check_tokens(path, tokenizer, where=where, trust_remote_code=recipe.model.trust_remote_code)
    return ModelInputs(config=config, tokenizer=tokenizer, notes=weights_left_out(config))


def check_lengths(
    recipe: Recipe, config: Any, *, shortest: int, longest: int, trained: int = 0, teachers_longest: int = 0
) -> None:
    """Raise UserError where a sequence is too long for a model, or could change the positions' table of others.

    The policy reads the `longest`, models beside it those that are `trained` on, and a teacher its own prompts. No
    weights are loaded.
    """
    models = {recipe.model.path or "model.architecture": (recipe.model, config)}
    for where, path in models_beside(recipe).items():
        model = ModelConfig(path=path, trust_remote_code=recipe.model.trust_remote_code)
        models[f"{where}: {path}"] = model, load_config(model)
    teacher = f"teacher.path: {recipe.teacher.path}" if recipe.teacher.path else next(iter(models))
    for where, (model, configuration) in models.items():
        most = max(longest if model is recipe.model else trained, teachers_longest * (where == teacher))
        has = max_positions(configuration)
        if model is not recipe.model or teachers_longest > longest:  # else the prompts were cut to its positions
            _check_positions_suffice(most, has, where=where)
        check_positions(empty_model(model, configuration), shortest=shortest, longest=most, where=where)


def _check_positions_suffice(longest: int, positions: int | None, *, where: str) -> None:
    if positions is not None and longest > positions:
        what = f"it may read {longest} tokens of a prompt with its response, and has {positions} positions"
        raise UserError(
            what, where=where, fix="lower rollout.max_new_tokens, shorten the prompts, or name another model"
        )


def quiet_transformers() -> None:
    """Have transformers show no progress bars or advice from now on: errors come as ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns at every fork otherwise
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel("ERROR")  # it reports each of its retries
