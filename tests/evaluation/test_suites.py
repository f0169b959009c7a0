"""Suites: files that a person reads, how a recipe names them, and which rows they ask."""

import json
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.evaluation.held_out import pass_at_k
from gspo.evaluation.sets import read_sets, read_suite
from gspo.recipe.load import dump_recipe, load_recipe, make_recipe
from gspo.recipe.sections import SuiteConfig
from gspo.recipe.suites import named_suites, suite_tree

OWN = """
queries: {path: rows.jsonl, template: "Q: {prompt}"}
samples: 4
temperature: 0.5
reward: exact_match
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite with its rows beside it, in a folder that is not the working directory."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "sums.yaml").write_text(OWN)
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "day": f"2024-0{n}-15T00:00:00"} for n in range(1, 7)]
    (tmp_path / "suites" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe_tree(*suites: Any, **evaluation: Any) -> dict[str, Any]:
    return {"name": "e", "steps": 1, "model": {"path": "m"}, "evaluation": {"suites": list(suites), **evaluation}}


@pytest.mark.parametrize("name", named_suites())
def test_a_suite_that_gspo_brings_is_whole_and_says_what_it_is(name: str) -> None:
    suite = SuiteConfig.model_validate(suite_tree(name))
    assert suite.name == name and len(suite.about) > 40
    assert suite.reward[0].function in ("math", "code") and suite.max_new_tokens is not None
    assert suite.queries.path or "--data" in suite.about


def test_a_suite_of_ones_own_is_a_file_and_its_data_lie_beside_it(folder: Path) -> None:
    (suite,) = make_recipe(recipe_tree("suites/sums.yaml")).evaluation.suites
    assert (suite.name, suite.samples, suite.temperature) == ("sums", 4, 0.5)
    assert suite.sampling == {"temperature": 0.5, "group_size": 4}  # what it does not say is the rollout's
    rows = read_suite(suite)
    assert [row.id for row in rows] == [f"sums:{n}" for n in range(1, 7)]
    assert rows[0].prompt == "1 + 1 =" and rows[0].columns["answer"] == "2"


def test_a_recipe_changes_keys_of_a_suite_and_writes_it_out_whole(folder: Path) -> None:
    changed = {"suite": "suites/sums.yaml", "name": "few", "queries": {"limit": 2}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe_tree("suites/sums.yaml", changed)))
    recipe = load_recipe("recipe.yaml", ["evaluation.suites.0.samples=8"])
    whole, few = recipe.evaluation.suites
    assert (whole.samples, few.samples, few.name) == (8, 4, "few")
    assert few.queries.template == whole.queries.template  # a section is changed key by key
    assert len(read_suite(few)) == 2
    (folder / "written.yaml").write_text(dump_recipe(recipe))
    assert load_recipe("written.yaml") == recipe


def test_a_suite_may_be_a_task_of_reasoning_gym() -> None:
    task = {"procedural": {"task": "chain_sum"}, "limit": 3}
    suite = SuiteConfig.model_validate({"name": "sums", "queries": task, "reward": ["reasoning_gym"]})
    assert [row.id for row in read_suite(suite)] == ["sums:1", "sums:2", "sums:3"]


@pytest.mark.parametrize(
    ("first", "last", "asked"),
    [
        ("2024-02-15", "2024-03-15", [2, 3]),
        ("2024-02-16", "2024-03-14", []),
        ("2024-03-15", "2024-12-31", [3, 4, 5, 6]),
    ],
)
def test_the_days_of_a_suite_count_from_the_first_to_the_last(
    folder: Path, first: str, last: str, asked: list[int]
) -> None:
    days = {"suite": "suites/sums.yaml", "dates": {"column": "day", "first": first, "last": last}}
    suite = SuiteConfig.model_validate(suite_tree(days))
    if asked:
        assert [row.id for row in read_suite(suite)] == [f"sums:{n}" for n in asked]
    else:
        with pytest.raises(UserError, match="no row has a day from"):
            read_suite(suite)


@pytest.mark.parametrize(
    ("suites", "words"),
    [
        (["gsm9k"], "no suite 'gsm9k'.*did you mean gsm8k"),
        (["missing.yaml"], "no such suite file"),
        (["livecodebench"], "no data of its own.*livecodebench.queries.path=FILE"),
        ([{"suite": "suites/sums.yaml", "samples": 2, "temperature": 0}], "temperature 0 gives 2 equal responses"),
        (
            [{"suite": "suites/sums.yaml", "dates": {"column": "d", "first": "2024-13-01", "last": "x"}}],
            "should be a day",
        ),
        (
            [{"suite": "suites/sums.yaml", "dates": {"column": "d", "first": "2024-01-01", "last": "2024-02-01"}}],
            "no d",
        ),
        (["suites/sums.yaml", "suites/sums.yaml"], "two suites are named 'sums'"),
        ([{"suite": "suites/sums.yaml", "name": "held_out"}], "two sets to evaluate on are named 'held_out'"),
        ([{"suite": "suites/sums.yaml", "sample": 4}], "did you mean evaluation.suites.0.samples"),
        ([{"suite": "suites/sums.yaml", "queries": {"path": "none.jsonl"}}], "no such file"),
        ([{"name": "bare"}], "reward"),
    ],
)
def test_a_suite_that_cannot_be_used_is_refused_with_what_to_do(folder: Path, suites: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=f"(?s){words}"):
        read_sets(make_recipe(recipe_tree(*suites)))


def test_rows_from_python_are_sets_too() -> None:
    (own,) = read_sets(make_recipe(recipe_tree()), {"mine": [{"question": "1?", "answer": "1"}]})
    assert (own.name, own.rows[0].id, own.suite) == ("mine", "mine:1", None)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 32])
def test_pass_at_k_is_the_chance_that_one_of_k_drawn_without_replacement_passes(n: int) -> None:
    rows = [[i < c for i in range(n)] for c in range(n + 1)]
    found = pass_at_k([*rows, [None] * n])  # what nothing judges is left out
    assert set(found) == {k for k in (2, 4, 8, 16, 32, n) if 2 <= k <= n}
    for k, rate in found.items():
        chances = [1 - Fraction(comb(n - c, k), comb(n, k)) for c in range(n + 1)]
        assert rate == pytest.approx(float(sum(chances) / len(chances)), rel=1e-13)


def test_pass_at_k_ends_at_what_every_question_has() -> None:
    assert set(pass_at_k([[True] * 8, [True, False, None, True, False]])) == {2, 4}
    assert pass_at_k([]) == pass_at_k([[None]]) == {}
    assert pass_at_k([[True] * 2000 + [False] * 3000])[4096] == 1.0  # where binomials have no float
