"""Every recipe in the tree is one, and the keys that others rely on exist."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from gspo.recipe.load import dump_recipe, load_recipe
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ActorConfig

ROOT = Path(__file__).parents[1]
RECIPES = sorted([*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "studies").rglob("*.yaml")])
CONTRACT = [  # DESIGN.md
    "name",
    "seed",
    "steps",
    "output_dir",
    "model.path",
    "model.architecture",
    "model.dtype",
    "cold_start.steps",
    "queries.path",
    "queries.prompt",
    "queries.procedural",
    "queries.limit",
    "rollout.engine",
    "rollout.queries_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "reward",
    "actor.importance_sampling_level",
    "actor.clip_low",
    "actor.clip_high",
    "actor.mini_batches",
    "actor.micro_batch_tokens",
    "actor.old_logprobs",
    "actor.routing_replay",
    "actor.optimizer.lr",
    "checkpoint.every",
    "checkpoint.keep",
    "evaluation.every",
    "report.trackers",
]


@pytest.mark.parametrize("path", RECIPES, ids=[str(path.relative_to(ROOT)) for path in RECIPES])
def test_every_recipe_in_the_tree_parses_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "again.yaml") == recipe


def test_a_recipe_is_named_like_its_file() -> None:
    assert RECIPES
    for path in (ROOT / "recipes").rglob("*.yaml"):
        assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("key", CONTRACT)
def test_every_key_of_the_contract_exists(key: str) -> None:
    section: type[BaseModel] = Recipe
    *parents, last = key.split(".")
    for parent in parents:
        annotation: Any = section.model_fields[parent].annotation
        assert issubclass(annotation, BaseModel)
        section = annotation
    assert last in section.model_fields


def test_the_levels_of_the_contract_are_accepted() -> None:
    for level in ("token", "sequence", "sequence_token"):
        assert ActorConfig(importance_sampling_level=level).importance_sampling_level == level
    for source in ("recompute", "engine"):
        assert ActorConfig(old_logprobs=source).old_logprobs == source


def test_the_default_run_is_the_one_that_was_asked_for() -> None:
    recipe = load_recipe(ROOT / "recipes" / "arithmetic.yaml")
    assert recipe.queries.procedural is not None and recipe.queries.procedural.task == "chain_sum"
    assert recipe.model.architecture is not None and recipe.model.architecture["model_type"] == "qwen3_moe"
    assert recipe.actor.mini_batches == 4 and recipe.actor.importance_sampling_level == "sequence"
    assert (recipe.evaluation.num_queries, recipe.evaluation.temperature) == (512, 1.0)


def test_the_gsm8k_recipe_has_the_papers_clip_range_and_the_math_reward() -> None:
    recipe = load_recipe(ROOT / "recipes" / "gsm8k.yaml")
    assert (recipe.actor.clip_low, recipe.actor.clip_high, recipe.actor.mini_batches) == (3e-4, 4e-4, 4)
    assert [reward.function for reward in recipe.reward] == ["math"]
