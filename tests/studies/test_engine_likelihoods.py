"""The study of the engine's likelihoods: its recipes, what it measures of the mismatch, and when it says what."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from studies.engine_likelihoods.arms import ARMS, DTYPES, GSPO, SEEDS, Arm
from studies.engine_likelihoods.figures import draw_all
from studies.engine_likelihoods.jobs import BASE, all_jobs
from studies.engine_likelihoods.measures import LATE_REWARD, change
from studies.engine_likelihoods.mismatch import by_token
from studies.engine_likelihoods.page import PAGE
from studies.engine_likelihoods.runs import Runs, load_runs
from studies.engine_likelihoods.tables import TABLES, answer
from studies.harness.jobs import as_arguments
from studies.harness.results import Result
from tests.studies.pages import lines_of_tables

from gspo.recipe.load import load_recipe


def result(late: float, *, old: str = "recompute") -> Result:
    clipped = 0.2 if old == "engine" else 0.0
    return Result(
        digest="d",
        overrides={},
        steps=6,
        failed=None,
        seconds={},
        pass_at_1=[0.4, late],
        evaluated_tokens=[],
        series={"reward/mean": [late] * 6, "hook/token_gap_mean": [0.01] * 6, "ratio/mismatch_log_std": [0.003] * 6},
        means={"clip/sequence_fraction_by_mini_batch": [clipped, 0.3, 0.3, 0.3]},
    )


def runs(late: Callable[[Arm, int], float]) -> Runs:
    found = {arm.name: {seed: result(late(arm, seed), old=arm.old) for seed in SEEDS} for arm in ARMS}
    return Runs(directory=Path("none"), found=found, missing=())


def test_the_arms_are_every_objective_with_every_engine_and_either_likelihood() -> None:
    jobs = list(all_jobs())
    assert len(jobs) == 2 * 2 * 2 * 5 and len({job.name for job in jobs}) == len(jobs)
    recipes = {job.name: load_recipe(BASE, as_arguments(job.overrides)) for job in jobs}
    chosen = {
        (r.actor.importance_sampling_level, r.rollout.vllm.dtype, r.actor.old_logprobs, r.seed)
        for r in recipes.values()
        if r.rollout.engine == "vllm" and r.model.dtype == "float32"
    }
    assert len(chosen) == len(jobs)


def test_all_arms_of_a_seed_begin_from_one_model_and_differ_in_nothing_else() -> None:
    for seed in SEEDS:
        jobs = [job for job in all_jobs() if job.seed == seed]
        assert len({(job.start.name, job.cold_digest) for job in jobs}) == 1
        assert load_recipe(BASE, as_arguments(jobs[0].cold_overrides)).rollout.engine == "embedded"
        recipes = [load_recipe(BASE, as_arguments(job.overrides)) for job in jobs]
        assert len({(r.steps, r.seed, r.actor.mini_batches, r.actor.optimizer.lr) for r in recipes}) == 1


def test_the_task_is_the_default_recipes() -> None:
    ours, default = (yaml.safe_load(path.read_text()) for path in (BASE, BASE.parents[2] / "recipes/arithmetic.yaml"))
    assert ours["queries"]["procedural"].pop("size")
    assert ours["queries"]["procedural"].items() <= default["queries"]["procedural"].items()
    assert ours["cold_start"]["demonstrations"] == default["cold_start"]["demonstrations"]


def test_the_mismatch_is_that_of_the_first_mini_batch_or_of_recomputed_likelihoods() -> None:
    metrics = {"mismatch/logprob_gap_mean": 0.5, "mismatch/logprob_gap_max": 0.7}
    first, later = {"mini_batch": 0, "token_log_ratios": [0.01, None, -0.03]}, {"mini_batch": 1}
    untrained = {"mini_batch": None, "token_log_ratios": None}
    found = by_token(1, metrics, [first, later | {"token_log_ratios": [9.0]}, untrained])["log"]
    assert found == pytest.approx({"token_gap_mean": 0.02, "token_gap_max": 0.03})
    found = by_token(1, metrics, [first | {"token_log_ratios": [0.0, 0.0]}])["log"]
    assert found == {"token_gap_mean": 0.5, "token_gap_max": 0.7}


def test_the_answer_follows_the_seeds() -> None:
    def late(loss: Callable[[int], float]) -> Callable[[Arm, int], float]:
        lost = ("gspo_bfloat16_engine",)
        return lambda arm, seed: 0.8 + 0.01 * seed - (loss(seed) if arm.name in lost else 0.0)

    assert "claim holds" in answer(runs(late(lambda seed: 0.001 * seed)))
    assert "does not hold" in answer(runs(late(lambda seed: 0.1 + 0.001 * seed)))
    assert "stays open" in answer(runs(late(lambda seed: 0.2 * (seed - 2))))
    found = change(runs(late(lambda seed: 0.1 + 0.001 * seed)), GSPO, "bfloat16", LATE_REWARD)
    assert found.low < found.mean < found.high < 0 and found.is_apart
    nothing = Runs(directory=Path("none"), found={}, missing=("main/gspo",))
    assert "No answer yet" in answer(nothing) and math.isnan(change(nothing, GSPO, "float32", LATE_REWARD).mean)


def test_tables_are_made_of_the_results_that_belong_to_the_recipes(tmp_path: Path) -> None:
    for job in all_jobs():
        replace(result(0.7), digest=job.digest).save(tmp_path / f"{job.name}.json")
    stale = next(all_jobs())
    replace(result(0.7), digest="of another recipe").save(tmp_path / f"{stale.name}.json")
    found = load_runs(tmp_path)
    assert found.missing == (stale.name,)
    draw_all(found, tmp_path)
    assert all(dtype in (tmp_path / "reward.svg").read_text(encoding="utf-8") for dtype in DTYPES)
    assert lines_of_tables(PAGE, TABLES, found)
