"""What a recipe changes about the distribution that responses are drawn from: checked, and put into sentences."""

import re
from collections.abc import Mapping
from typing import Any

from gspo.errors import UserError
from gspo.model.load import token_id
from gspo.recipe.published import PUBLISHED
from gspo.recipe.schema import Recipe


def biased_ids(logit_bias: Mapping[str, float], tokenizer: Any, vocabulary: int) -> dict[int, float]:
    """rollout.logit_bias by token id; UserError for a name that is no single token."""
    biases, where = dict[int, float](), "rollout.logit_bias"
    for name, bias in logit_bias.items():
        number = re.fullmatch(r"id:(\d+)", name)
        token = int(number[1]) if number else token_id(name, tokenizer, where=where)
        if token >= vocabulary:
            raise UserError(f"{name!r}: the model has tokens 0 to {vocabulary - 1}", where=where, fix="correct the id")
        biases[token] = bias
    return biases


def sampling_notes(recipe: Recipe, tokenizer: Any, config: Any) -> list[str]:
    """Say how q, which is drawn from, differs from π; UserError for names that are none of the tokenizer's tokens."""
    rollout, actor, sizes = recipe.rollout, recipe.actor, recipe.model.architecture or vars(config.get_text_config())
    biased_ids(rollout.logit_bias, tokenizer, sizes.get("vocab_size", len(tokenizer)))
    for string in rollout.stop_strings:
        if tokenizer.eos_token and tokenizer.eos_token in string:
            what = (
                f"{string!r} contains {tokenizer.eos_token}, which ends a response itself and is left out of its text"
            )
            raise UserError(what, where="rollout.stop_strings", fix="leave it out; rollout.stop_tokens takes others")
    if not (shaping := rollout.shaping):
        return []
    weighed = "nothing weighs them by π_old/q, as actor.correction: tis would"
    if PUBLISHED[actor.surrogate].weighs_by_engine:
        weighed = f"actor.surrogate: {actor.surrogate} weighs them by π_θ/q"
    elif actor.correction not in ("none", "ignore"):
        weighed = f"actor.correction: {actor.correction} weighs them by π_old/q"
    measured = "sampling/kept_mass" if rollout.engine == "embedded" else "not by a server"
    kept = f"at least {rollout.top_p:g}" if shaping == ["top_p"] else "an unknown part"
    return [
        f"rollout.{', '.join(shaping)}: tokens are drawn from q, which keeps {kept} of π's probability (measured: "
        f"{measured}); π_θ/π_old is of whole distributions, and {weighed}"
    ]
