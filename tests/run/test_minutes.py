"""How long a run takes at most, from what its products and its weights take."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from gspo.recipe.load import make_recipe
from gspo.recipe.schema import Recipe
from gspo.run.minutes import Speed, in_words, measured_speed, time_line_of_inputs

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 50_000, "tie_word_embeddings": True}
LAYER = 4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512 + 2 * 64  # attention, MLP and norms of Qwen3
PARAMETERS = 50_000 * 512 + 8 * LAYER + 512
CACHED = 4 * 2 * 8 * 8 * 64  # bytes of a token's keys and values


def recipe_of(**actor: Any) -> Recipe:
    rollout = {"queries_per_step": 4, "group_size": 8, "max_new_tokens": 100, "max_rows": 16}
    tree: dict[str, Any] = {"name": "r", "steps": 10, "rollout": rollout, "actor": {"mini_batches": 4, **actor}}
    tree |= {"model": {"architecture": {"model_type": "qwen3", **SIZES}, "tokenizer": "fit"}}
    tree |= {"queries": {"procedural": {"task": "chain_sum"}}, "reward": "math", "evaluation": {"num_queries": 0}}
    return make_recipe(tree, where="test")


def inputs_of(*, sets: Any = ()) -> Any:
    queries = SimpleNamespace(train=[SimpleNamespace(prompt_ids=[0] * 20)])
    config = AutoConfig.for_model("qwen3", **SIZES)
    return SimpleNamespace(config=config, queries=queries, evaluation_sets=sets)


def test_products_of_a_step_are_counted_by_tokens_and_passes() -> None:
    """Weights are read at once here: 2 operations a parameter and token forwards, 4 backwards."""
    speed = Speed(operations=0.5e10, reading=math.inf)
    sampled, prompts = 4 * 8 * 100, 4 * 20
    a_pass = 2 * PARAMETERS * (sampled + prompts) / 0.5e10
    training = a_pass * (3 + 3 / 4)  # and π_old of all mini-batches but the first
    line = time_line_of_inputs(recipe_of(), inputs_of(), speed, 4)
    assert line is not None and f"10 steps of {in_words(a_pass)} sampling and {in_words(training)} training" in line
    assert f"up to about {in_words(10 * (a_pass + training))}" in line
    line = time_line_of_inputs(recipe_of(old_logprobs="engine", epochs=2), inputs_of(), speed, 4)
    assert line is not None and f"{in_words(a_pass * 6)} training" in line


def test_decoding_reads_the_weights_for_each_token_of_each_round() -> None:
    line = time_line_of_inputs(recipe_of(), inputs_of(), Speed(operations=math.inf, reading=1e9), 4)
    token = 4 * PARAMETERS + 16 * CACHED * (20 + 100 / 2)
    assert line is not None and f"{in_words(2 * 100 * token / 1e9)} sampling" in line, "32 rows, 16 at a time"


def test_evaluations_are_those_before_and_after_and_in_between() -> None:
    recipe = recipe_of()
    sets = [SimpleNamespace(queries=[None] * 5, sampling=recipe.rollout.model_copy(update={"group_size": 1}))]
    recipe = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"every": 4})})
    line = time_line_of_inputs(recipe, inputs_of(sets=sets), Speed(operations=math.inf, reading=1e9), 4)
    token = 4 * PARAMETERS + 5 * CACHED * (20 + 100 / 2)
    assert line is not None and f"4 evaluations of {in_words(100 * token / 1e9)}" in line


def test_of_a_small_model_nothing_is_said() -> None:
    inputs, recipe = inputs_of(), recipe_of()
    small = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 1}
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"architecture": small})})
    inputs.config = AutoConfig.for_model(**small)
    assert time_line_of_inputs(recipe, inputs, Speed(operations=1.0, reading=1.0), 4) is None


def test_the_speed_of_this_machine_is_numbers() -> None:
    speed = measured_speed(torch.device("cpu"), torch.float32)
    assert speed.operations > speed.reading > 0


@pytest.mark.parametrize(("seconds", "words"), [(4.26, "4.3 s"), (130.0, "2 minutes"), (7000.0, "1.9 hours")])
def test_durations_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
