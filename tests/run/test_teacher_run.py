"""Runs with a teacher: resumed bit by bit, taught by another model or by itself, and what cannot teach refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breaking_off import APPRAISAL, GRADIENT, SAMPLING, differing, lasting, recipe_of, result, train
from tests.small_model import save_small_model

import gspo
from gspo.recipe.schema import Recipe

LEVEL = ("actor.importance_sampling_level=sequence_token", "actor.clip_low=0.2", "actor.clip_high=0.2")
ANOTHER, HINT = "teacher.path=teacher", "teacher.prompt='{prompt} {answer}'"


def taught(*keys: str, name: str = "broken") -> Recipe:
    """The recipe of a small model in `student/`, with another in `teacher/`."""
    for seed, directory in enumerate(("student", "teacher")):
        if not Path(directory).exists():
            torch.manual_seed(seed)
            save_small_model(Path(directory))
    model = "model={path: student, device: cpu}"
    return recipe_of(name, model, "evaluation.num_queries=0", "cold_start.steps=0", "queries.chat=false", *LEVEL, *keys)


@pytest.mark.parametrize("keys", [(ANOTHER,), (ANOTHER, HINT), (HINT, "teacher.advantage_weight=0")])
def test_a_resumed_run_is_the_unbroken_one(keys: tuple[str, ...], broken_off: Callable[..., Any]) -> None:
    recipe = taught(*keys)
    unbroken = train(recipe.model_copy(update={"name": "unbroken"}))
    for place, count in [(SAMPLING, 1), (APPRAISAL, 1), (GRADIENT, 3)]:
        broken_off(recipe, place, count, resume=recipe.run_dir.exists())
    outcome = train(recipe, resume=True)
    assert lasting(outcome.metrics) == lasting(unbroken.metrics)
    assert differing(result(recipe.name), result("unbroken")) == []


def test_a_policy_without_another_model_or_prompt_is_not_taught() -> None:
    assert "teacher/kl" not in train(taught("steps=1")).metrics[0]


def test_another_teacher_is_refused_when_a_run_goes_on() -> None:
    recipe = taught(ANOTHER)
    train(recipe)
    shutil.rmtree("teacher")
    torch.manual_seed(5)
    save_small_model(Path("teacher"))
    with pytest.raises(gspo.UserError, match=r"teacher(.|\n)*of the teacher, are not those that the run began with"):
        train(recipe.model_copy(update={"steps": 4}), resume=True)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"special": ["<|more|>"]}, r"teacher\.path: teacher(.|\n)*its tokens are not the policy's.*<\|more\|>"),
        ({"max_position_embeddings": 20}, r"teacher\.path: teacher(.|\n)*and has 20 positions"),
    ],
)
def test_a_teacher_that_cannot_read_the_responses_is_refused(changes: dict[str, Any], refusal: str) -> None:
    save_small_model(Path("teacher"), **changes)
    with pytest.raises(gspo.UserError, match=refusal):
        train(taught(ANOTHER))
    assert not Path("runs").exists()


def test_a_policy_with_too_few_positions_for_its_own_hint_is_refused() -> None:
    save_small_model(Path("student"), max_position_embeddings=90)
    with pytest.raises(gspo.UserError, match=r"student(.|\n)*and has 90 positions"):
        train(taught("teacher.prompt='{prompt} and the answer is, as everybody knows, {answer}'"))
