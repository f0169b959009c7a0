"""The study of the sampler: its recipes, and its page."""

from pathlib import Path
from typing import Any

from studies.harness.jobs import as_arguments
from studies.harness.results import Result
from studies.harness.runs import read_runs
from studies.sampler.jobs import ARMS, SEEDS, TASKS, all_jobs
from studies.sampler.page import PAGE
from studies.sampler.tables import TABLES, at
from tests.studies.pages import lines_of_tables

from gspo.recipe.load import load_recipe


def test_arms_differ_in_which_queries_are_sampled_alone() -> None:
    own: dict[str, Any] = {"queries": {"sampler"}, "rollout": {"dynamic_sampling"}}
    for start in TASKS.values():
        jobs = [job for job in all_jobs() if job.seed == SEEDS[0] and job.start is start]
        recipes = [load_recipe(job.base, as_arguments(job.overrides)) for job in jobs]
        assert len(recipes) == len(ARMS) and len({recipe.model_dump_json(exclude=own) for recipe in recipes}) == 1
        assert {(each.queries.sampler, each.rollout.dynamic_sampling) for each in recipes} == {
            ("order", False),
            ("difficulty", False),
            ("order", True),
        }


def test_tables_are_made_of_the_results(tmp_path: Path) -> None:
    for place, job in enumerate(all_jobs()):
        series = {"tokens/forward_equivalents": [1000.0] * 32, "group/zero_variance_fraction": [0.25] * 32}
        own: dict[str, Any] = {"overrides": {}, "steps": 32, "failed": None, "seconds": {}, "evaluated_tokens": []}
        passed = [0.25, 0.5 + 0.001 * place, 0.75]
        result = Result(**own, digest=job.digest, pass_at_1=passed, series=series, means={}, suites={})
        result.save(tmp_path / f"{job.name}.json")
    runs = read_runs(tmp_path, all_jobs())
    assert not runs.missing
    for name, lines in lines_of_tables(PAGE, TABLES, runs).items():
        assert "–" not in "".join(lines), name
    assert "0.250 of the sums of 5 to 7 terms" in TABLES["start"](runs)
    one = next(iter(runs.of("mixed", ARMS[0]).values()))
    half, end = one.pass_at_1[1:]
    assert at(8000)(one) == (0.25 + half) / 2 and abs(at(20000)(one) - (0.75 * half + 0.25 * end)) < 1e-9
