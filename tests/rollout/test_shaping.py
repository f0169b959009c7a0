"""Names of tokens in a recipe, and what is said of a distribution that is shaped."""

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoConfig

from gspo.recipe.load import dump_recipe, make_recipe
from gspo.recipe.schema import Recipe
from gspo.recipe.yaml_text import read_yaml
from gspo.rollout.shaping import biased_ids, sampling_notes

V = 1000


def recipe_of(rollout: Mapping[str, Any], **actor: Any) -> Recipe:
    return make_recipe(
        {"name": "a", "steps": 1, "model": {"path": "m"}, "rollout": rollout, "actor": {"surrogate": "clip", **actor}}
    )


def test_a_token_is_named_by_its_text_or_its_id_and_read_back_so(fitted_tokenizer: Any) -> None:
    ids = fitted_tokenizer.convert_tokens_to_ids(["cat ", "3", "<eos>"])
    recipe = recipe_of({"logit_bias": {"cat ": -5, ids[1]: 2.5, "<eos>": 100}})
    assert biased_ids(recipe.rollout.logit_bias, fitted_tokenizer, V) == dict(zip(ids, [-5, 2.5, 100], strict=True))
    assert make_recipe(read_yaml(dump_recipe(recipe), where="")) == recipe
    digit = {"3": 1.0, 3: 2.0}  # a token's text, and an id
    found = biased_ids(recipe_of({"logit_bias": digit}).rollout.logit_bias, fitted_tokenizer, V)
    assert found == {ids[1]: 1.0, 3: 2.0}


@pytest.mark.parametrize(
    ("rollout", "actor", "words"),
    [
        ({}, {}, []),
        ({"temperature": 0.5, "stop_strings": ["a"]}, {}, []),
        ({"stop_strings": ["7<pad>"]}, {}, []),  # a special token that does not end responses is text like any other
        ({"top_p": 0.95}, {}, ["rollout.top_p: tokens are drawn from q, which keeps at least 0.95 of π's probability"]),
        ({"top_p": 0.95}, {}, ["nothing weighs them by π_old/q, as actor.correction: tis would"]),
        ({"top_p": 0.95, "min_p": 0.1}, {}, ["rollout.top_p, min_p: tokens are drawn from q, which keeps an unknown"]),
        ({"repetition_penalty": 1.1}, {"correction": "tis"}, ["actor.correction: tis weighs them by π_old/q"]),
        ({"top_k": V - 1}, {"surrogate": "minirl"}, ["minirl weighs them by π_θ/q"]),
        ({"top_p": 0.9}, {"correction": "geometric_mask"}, ["geometric_mask weighs them"]),
    ],
    ids=str,
)
def test_what_shapes_the_distribution_is_noted_with_what_it_keeps(
    rollout: Any, actor: Any, words: list[str], fitted_tokenizer: Any
) -> None:
    config = AutoConfig.for_model("qwen3", vocab_size=V)
    notes = sampling_notes(recipe_of(rollout, **actor), fitted_tokenizer, config)
    assert len(notes) == len(words)
    assert [word for word, note in zip(words, notes, strict=True) if word not in note] == [], notes
