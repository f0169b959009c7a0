"""The study of baselines: its recipes, the choice of learning rates, and its page."""

from pathlib import Path
from typing import Any

import pytest
from studies.baselines import arms
from studies.baselines.arms import ARMS, CONDITIONS, GRID, SEEDS, TASKS, all_jobs, grid_jobs, study_jobs
from studies.baselines.page import PAGE
from studies.baselines.rates import chosen
from studies.baselines.tables import TABLES
from studies.harness.jobs import Job, as_arguments
from studies.harness.results import Result
from studies.harness.runs import read_runs
from tests.studies.pages import lines_of_tables

from gspo.recipe.load import load_recipe


@pytest.fixture(autouse=True)
def _rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates as a grid would choose them."""
    rates = ",".join(f'"{task}": {{' + ",".join(f'"{arm.name}": 1e-5' for arm in ARMS) + "}" for task in TASKS)
    (tmp_path / "rates.json").write_text(f"{{{rates}}}")
    monkeypatch.setattr(arms, "RATES", tmp_path / "rates.json")


def save(job: Job, folder: Path, late: float) -> None:
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, late, late, late]
    series: dict[str, Any] = {"reward/mean": rewards}
    names = ("clip/token_fraction", "clip/sequence_fraction", "response/mean_tokens", "policy/entropy")
    series |= dict.fromkeys(names, [0.1] * 8)
    own: dict[str, Any] = {"steps": 8, "failed": None, "seconds": {"run": 60.0}, "pass_at_1": [0.1, late]}
    result = Result(**own, overrides=job.overrides, digest=job.digest, evaluated_tokens=[], series=series, means={})
    result.save(folder / f"{job.name}.json")


def test_arms_have_the_same_queries_and_updates_and_differ_in_what_they_say() -> None:
    jobs = [job for job in study_jobs() if job.seed == SEEDS[0] and job.experiment in TASKS]
    recipes = [load_recipe(job.base, as_arguments(job.overrides)) for job in jobs]
    assert len(recipes) == len(TASKS) * len(ARMS)
    for task in TASKS:
        own = [recipe for recipe, job in zip(recipes, jobs, strict=True) if job.experiment == task]
        assert len({recipe.actor.model_dump_json() for recipe in own}) == len(ARMS)
        shared = {(r.rollout.model_dump_json(), r.steps, r.actor.updates_per_step, r.queries.path) for r in own}
        assert len(shared) == 1
    assert len({job.name for job in all_jobs()}) == len([*all_jobs()])


def test_the_rate_is_the_one_with_the_highest_late_reward(tmp_path: Path) -> None:
    for job in grid_jobs():
        rate = job.overrides["actor.optimizer.lr"]
        save(job, tmp_path, {GRID[0]: 0.6, GRID[1]: 0.8, GRID[2]: 0.7, GRID[3]: 0.5}[rate])
    runs = read_runs(tmp_path, grid_jobs())
    assert all(chosen(runs, task, arm.name) == GRID[1] for task in TASKS for arm in ARMS)
    assert chosen(read_runs(tmp_path / "none", grid_jobs()), "sums", "gspo") is None


def test_tables_are_made_of_the_results(tmp_path: Path) -> None:
    for place, job in enumerate(all_jobs()):
        save(job, tmp_path, 0.9 - 0.001 * place)
    runs = read_runs(tmp_path, all_jobs())
    assert not runs.missing
    for name, lines in lines_of_tables(PAGE, TABLES, runs).items():
        if name.endswith("_conditions"):
            assert len(lines) == 2 + 1 + len(CONDITIONS) and "–" not in "".join(lines)
