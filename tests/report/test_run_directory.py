"""The run directory: created once, written line by line, readable as JSON whatever the numbers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.config import Recipe
from gspo.config_file import load_recipe, make_recipe
from gspo.errors import UserError
from gspo.policy.model import Policy
from gspo.policy.update import Trained
from gspo.records import Batch, Group, Query, Rollout, Score
from gspo.report.run_directory import RunDirectory, check_absent


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe({"name": "a", "steps": 1, "model": {"path": "m"}, "output_dir": str(tmp_path / "deep" / "run")})


@pytest.fixture
def directory(recipe: Recipe) -> RunDirectory:
    return RunDirectory.create(recipe)


def strict(line: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_directory_is_made_with_its_recipe_and_only_once(recipe: Recipe, directory: RunDirectory) -> None:
    assert load_recipe(directory.path / "recipe.yaml") == recipe
    with pytest.raises(UserError, match="never overwrites"):
        RunDirectory.create(recipe)


def test_a_file_in_the_place_of_the_directory_is_not_overwritten(recipe: Recipe) -> None:
    recipe.run_dir.parent.mkdir(parents=True)
    recipe.run_dir.write_text("precious", encoding="utf-8")
    with pytest.raises(UserError, match=str(recipe.run_dir)):
        RunDirectory.create(recipe)
    assert recipe.run_dir.read_text(encoding="utf-8") == "precious"


def test_looking_whether_a_directory_is_free_changes_nothing(recipe: Recipe) -> None:
    recipe.run_dir.mkdir(parents=True)
    check_absent(recipe)  # empty: free
    assert recipe.run_dir.is_dir()
    RunDirectory.create(recipe)


def test_numbers_that_are_not_finite_are_written_as_null(directory: RunDirectory) -> None:
    line = {"a": math.nan, "b": [1.0, math.inf], "c": -math.inf, "d": 0.1 + 0.2, "e": "é", "f": None, "g": 3}
    directory.append("metrics.jsonl", line)
    directory.append("metrics.jsonl", {"step": 2})
    first, second = (directory.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert strict(first) == {"a": None, "b": [1.0, None], "c": None, "d": 0.1 + 0.2, "e": "é", "f": None, "g": 3}
    assert strict(second) == {"step": 2}


def small_batch(reward: float | None = 1.0) -> Batch:
    query = Query(id="rows:1", prompt="p", text="rendered p", prompt_ids=(1,), columns={})
    rollouts = tuple(
        Rollout(
            response_ids=torch.tensor([3, 4]),
            text=text,
            sampler_logprobs=torch.full((2,), -1.0),
            finish_reason="stop",
            policy_version=8,
        )
        for text in ("line\nbreak", "second")
    )
    scores = (Score(reward=reward, parts={"f": reward}), Score(reward=0.0, parts={"f": 0.0}))
    return Batch(groups=(Group(query=query, rollouts=rollouts),), scores=scores, advantages=(0.5, 0.0))


def one_trained(ratio: float) -> Trained:
    return Trained(
        index=0,
        mini_batch=0,
        num_tokens=2,
        num_clipped=1,
        sequence_ratio=ratio,
        entropy_sum=1.0,
        old_logprobs=torch.full((2,), -1.0),
    )


def test_a_rollout_is_a_line_with_what_the_model_read_said_and_got(directory: RunDirectory) -> None:
    path = directory.write_rollouts(3, small_batch(), [one_trained(1.25)])
    assert path.name == "step_000003.jsonl"
    first, second = (strict(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "query": "rows:1",
        "prompt": "rendered p",
        "completion": "line\nbreak",
        "reward": 1.0,
        "rewards": {"f": 1.0},
        "advantage": 0.5,
        "sequence_ratio": 1.25,
        "clipped": 0.5,
        "tokens": 2,
        "finish_reason": "stop",
        "policy_version": 8,
    }
    assert (second["sequence_ratio"], second["clipped"]) == (None, None)


def test_rollouts_are_json_too_where_a_ratio_is_not_finite_or_a_reward_is_none(directory: RunDirectory) -> None:
    path = directory.write_rollouts(1, small_batch(reward=None), [one_trained(math.nan)])
    first = strict(path.read_text(encoding="utf-8").splitlines()[0])
    assert first["reward"] is None and first["sequence_ratio"] is None


def test_only_the_newest_checkpoints_are_kept(directory: RunDirectory, new_policy: Callable[..., Policy]) -> None:
    policy = new_policy()
    for step in (5, 10, 15):
        directory.save_checkpoint(step, policy, keep=2)
    names = [path.name for path in sorted((directory.path / "checkpoints").iterdir())]
    assert names == ["step_000010", "step_000015"]
    assert (directory.path / "checkpoints" / "step_000015" / "model" / "model.safetensors").is_file()
