"""What is known of a recipe's model without its weights: its configuration and its tokenizer."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from gspo.model.load import (
    check_reference,
    empty_model,
    load_config,
    make_tokenizer,
    max_positions,
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

    UserError where the actor's settings, or the reference model, do not fit them.
    """
    quiet_transformers()
    config = load_config(recipe.model)
    check_declared(recipe.actor, config)
    tokenizer = make_tokenizer(recipe.model, texts)
    check_reference(recipe.actor.kl, tokenizer, trust_remote_code=recipe.model.trust_remote_code)
    return ModelInputs(config=config, tokenizer=tokenizer, notes=weights_left_out(config))


def check_lengths(recipe: Recipe, config: Any, *, shortest: int, longest: int) -> None:
    """Raise UserError where a sequence could change the positions' table of others beside it; load no weights."""
    limits = {"shortest": shortest, "longest": longest}
    check_positions(empty_model(recipe.model, config), **limits, where=recipe.model.path or "model.architecture")
    if recipe.actor.kl.coefficient and (named := recipe.actor.kl.reference):
        model = ModelConfig(path=named, trust_remote_code=recipe.model.trust_remote_code)
        check_positions(empty_model(model, load_config(model)), **limits, where=f"actor.kl.reference: {named}")


def quiet_transformers() -> None:
    """Have transformers show no progress bars or advice from now on: errors come as ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns at every fork otherwise
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel("ERROR")  # it reports each of its retries
