"""The study of a run that grows: its recipes, and its page."""

from pathlib import Path
from typing import Any

from studies.growth.jobs import ARMS, BASE, SEEDS, TERMS, all_jobs
from studies.growth.page import PAGE
from studies.growth.tables import TABLES
from studies.harness.jobs import as_arguments
from studies.harness.results import Result
from studies.harness.runs import read_runs
from tests.studies.pages import lines_of_tables

from gspo.recipe.load import load_recipe


def test_arms_differ_in_what_is_asked_and_when_and_end_alike() -> None:
    recipes = [load_recipe(BASE, as_arguments(job.overrides)) for job in all_jobs() if job.seed == SEEDS[0]]
    growing, _, last = recipes
    own: dict[str, Any] = {"phases": True, "queries": {"weights"}, "rollout": {"max_new_tokens"}}
    assert len(recipes) == len(ARMS) and len({recipe.model_dump_json(exclude=own) for recipe in recipes}) == 1
    assert growing.at(1).queries.shares == {"short": 1, "middle": 0, "long": 0}
    ended = growing.at(growing.steps)
    assert (ended.queries.shares, ended.rollout) == (last.queries.shares, last.rollout)


def test_tables_are_made_of_the_results(tmp_path: Path) -> None:
    for place, job in enumerate(all_jobs()):
        series = {"reward/mean": [0.5] * 6, "response/mean_tokens": [10.0] * 6}
        own: dict[str, Any] = {"overrides": {}, "steps": 6, "failed": None, "seconds": {"run": 120.0}, "pass_at_1": []}
        suites = {name: [0.25, 0.5 + 0.001 * place] for name in TERMS}
        result = Result(**own, digest=job.digest, evaluated_tokens=[], series=series, means={}, suites=suites)
        result.save(tmp_path / f"{job.name}.json")
    runs = read_runs(tmp_path, all_jobs())
    assert not runs.missing
    for name, lines in lines_of_tables(PAGE, TABLES, runs).items():
        assert "–" not in "".join(lines), name
    assert "| 15.4 ± 0.0 | 2.000 ± 0.000 |" in TABLES["arms"](runs)  # 60 tokens × 256 responses, in two minutes
    assert "0.250 of the long sums" in TABLES["start"](runs)
