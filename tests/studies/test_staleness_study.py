"""The study of staleness: its recipes, and its page."""

from pathlib import Path
from typing import Any

from studies.harness.jobs import as_arguments
from studies.harness.results import Result
from studies.harness.runs import read_runs
from studies.objectives.jobs import BASE
from studies.staleness.jobs import ARMS, ETAS, SEEDS, all_jobs
from studies.staleness.page import PAGE
from studies.staleness.tables import TABLES
from tests.studies.pages import lines_of_tables

from gspo.recipe.load import load_recipe


def test_arms_differ_in_nothing_but_what_they_say() -> None:
    recipes = {job.name: load_recipe(BASE, as_arguments(job.overrides)) for job in all_jobs() if job.seed == SEEDS[0]}
    assert len(recipes) == len(ARMS) * len(ETAS)
    for name, recipe in recipes.items():
        eta = int(name.partition("/")[0].removeprefix("staleness_"))
        assert recipe.rollout.max_staleness == eta and recipe.rollout.in_turn == (eta > 0)
        assert recipe.rollout.is_in_trainer and recipe.rollout.too_old == "drop"
    shared = {
        (recipe.steps, recipe.actor.mini_batches, recipe.actor.optimizer.lr, recipe.queries.model_dump_json())
        for recipe in recipes.values()
    }
    assert len(shared) == 1


def test_tables_are_made_of_the_results(tmp_path: Path) -> None:
    for place, job in enumerate(all_jobs()):
        rewards = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9 - 0.001 * place]
        series = {"reward/mean": rewards, "clip/token_fraction": [0.1] * 6}
        series |= {"ratio/staleness_log_std": [0.03] * 6, "ratio/mismatch_log_std": [0.04] * 6}
        own: dict[str, Any] = {"overrides": {}, "steps": 6, "failed": None, "seconds": {}, "pass_at_1": [0.4, 0.9]}
        result = Result(**own, digest=job.digest, evaluated_tokens=[], series=series, means={})
        result.save(tmp_path / f"{job.name}.json")
    runs = read_runs(tmp_path, all_jobs())
    assert not runs.missing
    for name, lines in lines_of_tables(PAGE, TABLES, runs).items():
        assert "–" not in "".join(lines), name
    ratios = TABLES["ratios"](runs).splitlines()[2:]
    spreads = [line.split("|")[3].strip().partition(" ")[0] for line in ratios]
    assert spreads == ["0.050", "0.050", "0.050", "0.030"]  # with the engine's π_old log s is of both; 3² + 4² = 5²
