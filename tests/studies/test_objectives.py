"""The study of objectives: its recipes, its reward, and what its tables call a tie."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from studies.harness.jobs import as_arguments
from studies.harness.results import Result
from studies.harness.runs import read_runs
from studies.objectives.arms import CUTS, LENGTHS, OBJECTIVES, RANGES, SEEDS
from studies.objectives.jobs import BASE, OBJECTIVE, all_jobs
from studies.objectives.measures import gain, is_apart, late, settled
from studies.objectives.page import PAGE
from studies.objectives.tables import TABLES
from studies.objectives.worked import always, lines_right
from tests.studies.pages import lines_of_tables

from gspo.recipe.load import load_recipe
from gspo.recipe.published import PUBLISHED
from gspo.recipe.schema import Recipe

LATE = late("reward/mean")


def result(rewards: list[float], *, clipped: float = 0.1) -> Result:
    each = [1.0] * len(rewards)
    return Result(
        digest="d",
        overrides={},
        steps=len(rewards),
        failed=None,
        seconds={},
        pass_at_1=[0.4, rewards[-1]],
        evaluated_tokens=[],
        series={
            "reward/mean": rewards,
            "clip/token_fraction": [clipped * one for one in each],
            "policy/grad_norm": each,
            "group/sampled": [32 * one for one in each],
        },
        means={},
    )


def arm(*late_rewards: float) -> dict[int, Result]:
    return {seed: result([value] * 6) for seed, value in enumerate(late_rewards)}


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    return {job.name: load_recipe(BASE, as_arguments(job.overrides)) for job in all_jobs() if job.seed == SEEDS[0]}


def test_every_published_objective_is_an_arm_and_every_arm_a_recipe(recipes: dict[str, Recipe]) -> None:
    ours = {name: recipe.actor for name, recipe in recipes.items() if name.startswith(f"{OBJECTIVE}/")}
    assert {actor.surrogate for actor in ours.values()} == set(PUBLISHED)
    assert {actor.title for actor in ours.values()} >= {"GSPO", "GSPO-token", "GRPO"}
    for job in all_jobs():
        load_recipe(BASE, as_arguments(job.cold_overrides))


def test_all_arms_spend_the_same_updates_on_the_same_queries(recipes: dict[str, Recipe]) -> None:
    for experiment in (OBJECTIVE, *(length.name for length in (*LENGTHS, *CUTS))):
        found = [recipe for name, recipe in recipes.items() if name.startswith(f"{experiment}/")]
        budgets = {
            (recipe.steps, recipe.actor.mini_batches, recipe.actor.optimizer.lr, recipe.queries, recipe.seed)
            for recipe in map(_hashable, found)
        }
        sampling = {recipe.rollout.model_copy(update={"dynamic_sampling": False}).model_dump_json() for recipe in found}
        assert len(budgets) == 1 and len(sampling) == 1, experiment


def _hashable(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"queries": recipe.queries.model_dump_json()})


def test_the_task_is_the_default_recipes() -> None:
    ours, default = (yaml.safe_load(path.read_text()) for path in (BASE, BASE.parents[2] / "recipes/arithmetic.yaml"))
    assert ours["model"] == default["model"] and ours["queries"]["procedural"].pop("size")
    assert ours["queries"]["procedural"].items() <= default["queries"]["procedural"].items()
    assert ours["cold_start"]["demonstrations"] == default["cold_start"]["demonstrations"]


def test_a_line_is_right_if_it_goes_on_from_the_one_before() -> None:
    entry = {"answer": "8", "metadata": {"expression": "7 + 4 - 3"}}
    demonstration = always({"task": "chain_sum", "entry": entry}, random.Random(0))
    scores = {
        demonstration: 1.0,
        "7+4=11, 11-3=9": 0.5,  # a wrong sum
        "7+4=12, 12-3=9": 0.5,  # a wrong sum, from which the next line goes on rightly
        "7+4=11, 11+3=14": 0.5,  # a wrong term
        "7+4=11, 10-3=7": 0.5,  # a wrong total
        "7+4=11, 11-3=8, 8+1=9": 2 / 3,
        "<answer>8</answer>": 0.0,
    }
    assert lines_right([""] * 7, list(scores), entry=[entry] * 7) == pytest.approx(list(scores.values()))


def test_what_seeds_may_explain_is_a_tie() -> None:
    base = arm(0.80, 0.82, 0.84)
    assert is_apart(arm(0.70, 0.72, 0.75), base, LATE)
    assert not is_apart(arm(0.79, 0.81, 0.83), base, LATE)  # always below, by less than seeds are apart
    assert not is_apart(arm(0.60, 0.83, 0.70), base, LATE)  # not below in every seed
    assert not is_apart(arm(0.40, 0.81, 0.80), base, LATE)  # below in every seed, but by chance
    assert not is_apart(base, base, LATE) and not is_apart({}, base, LATE)


def test_measures_look_at_the_steps_that_they_name() -> None:
    run = result([0.1, 0.1, 0.1, 0.2, 0.2, 0.6, 0.6, 0.6, 0.6, 0.6])
    assert LATE(run) == pytest.approx(0.6) and gain(run) == pytest.approx(0.5)
    assert LATE(replace(run, steps=12)) == pytest.approx(0.6 * 3 / 5)  # two steps were never made
    assert settled("reward/mean")(run) == pytest.approx(0.6) and math.isnan(settled("clip/low")(run))


def test_tables_are_made_of_the_results_that_belong_to_the_recipes(tmp_path: Path) -> None:
    for place, job in enumerate(all_jobs()):
        made = result([0.5, 0.6, 0.7, 0.8, 0.9, 0.9 - 0.001 * place], clipped=0.15 if job.arm.name == "itself" else 0.5)
        replace(made, digest=job.digest).save(tmp_path / f"{job.name}.json")
    stale = next(all_jobs())
    replace(result([0.5] * 6), digest="of another recipe").save(tmp_path / f"{stale.name}.json")
    runs = read_runs(tmp_path, all_jobs())
    assert runs.missing == (stale.name,)
    tables = {name: write(runs) for name, write in TABLES.items()}
    for objective in OBJECTIVES:
        assert f"| {objective.label} | {objective.what} | {len(SEEDS)} |" in tables["objectives"]
    assert tables["lengths"].count("0.150 ± 0.000") == len(LENGTHS)
    assert len(tables["cuts"].splitlines()) == 2 + len(RANGES) + 2
    assert lines_of_tables(PAGE, TABLES, runs)
