"""The study of credit by turn: its recipes, and its page."""

from pathlib import Path
from typing import Any

from studies.harness.jobs import as_arguments
from studies.harness.results import Result
from studies.harness.runs import read_runs
from studies.turns.jobs import ARMS, BASE, SEEDS, all_jobs
from studies.turns.page import PAGE
from studies.turns.tables import TABLES
from tests.studies.pages import lines_of_tables

from gspo.recipe.load import load_recipe


def test_arms_differ_in_nothing_but_what_they_say() -> None:
    recipes = [load_recipe(BASE, as_arguments(job.overrides)) for job in all_jobs() if job.seed == SEEDS[0]]
    assert len(recipes) == len(ARMS)
    own: dict[str, Any] = {
        "turn_credit": True,
        "importance_sampling_level": True,
        "advantage": True,
        "length_norm": True,
    }
    own |= {"optimizer": {"max_grad_norm"}}
    assert len({recipe.actor.model_dump_json(exclude=own) for recipe in recipes}) == 1
    assert len({recipe.model_dump_json(exclude={"actor"}) for recipe in recipes}) == 1
    credits = [(recipe.actor.importance_sampling_level, recipe.actor.turn_credit) for recipe in recipes]
    gspo, by_turn = ("sequence", "trajectory"), ("sequence_token", "return_to_go")
    assert credits == [gspo, gspo, ("sequence_token", "trajectory"), by_turn, by_turn, by_turn]


def test_tables_are_made_of_the_results(tmp_path: Path) -> None:
    for place, job in enumerate(all_jobs()):
        series = {"reward/mean": [0.5, 0.6, 0.7, 0.8, 0.9, 0.9 - 0.001 * place], "clip/token_fraction": [0.1] * 6}
        series |= {"policy/grad_norm": [0.5] * 6}
        series |= {"turns/mean": [4.0] * 6, "turns/written_fraction": [0.5] * 6, "response/mean_tokens": [24.0] * 6}
        own: dict[str, Any] = {"overrides": {}, "steps": 6, "failed": None, "seconds": {}, "pass_at_1": [0.4, 0.9]}
        result = Result(**own, digest=job.digest, evaluated_tokens=[], series=series, means={})
        result.save(tmp_path / f"{job.name}.json")
    runs = read_runs(tmp_path, all_jobs())
    assert not runs.missing
    for name, lines in lines_of_tables(PAGE, TABLES, runs).items():
        assert "–" not in "".join(lines), name
    assert "| 3.000 ± 0.000 |" in TABLES["arms"](runs)  # 24 tokens, half of them written, in 4 turns
