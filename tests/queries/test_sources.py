"""Several sources of queries: how much is taken of each, that no query is taken twice too soon, and bad recipes."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.queries.order import indices_of_source, sources_of
from gspo.queries.source import load_rows, render_rows
from gspo.recipe.schema import Recipe

RecipeOf = Callable[..., Recipe]
SHARES = {"a": 0.1, "b": 0.55, "c": 0.0, "d": 0.35}


def test_a_batch_has_of_each_source_what_its_share_says_up_to_rounding() -> None:
    total = Counter[str]()
    for number in range(2000):
        counts = Counter(sources_of(number, SHARES, queries_per_step=8, seed=1))
        assert counts.total() == 8
        for name, share in SHARES.items():
            assert int(8 * share) <= counts[name] <= int(8 * share) + (8 * share > int(8 * share))
        total += counts
    for name, share in SHARES.items():
        assert abs(total[name] / 16_000 - share) < 0.003


def test_the_sources_of_a_batch_are_mixed() -> None:
    first = Counter(sources_of(number, {"a": 1.0, "b": 1.0}, queries_per_step=8, seed=0)[0] for number in range(400))
    assert 150 < first["a"] < 250


@pytest.mark.parametrize("size", [8, 20, 24, 25, 100])
def test_each_query_of_a_source_comes_once_a_pass_and_none_twice_in_a_step(size: int) -> None:
    options: dict[str, Any] = {"num_queries": size, "queries_per_step": 8, "seed": 3, "shuffle": True}
    taken = list[int]()
    for step in range(300):
        indices = indices_of_source("a", len(taken), 1 + step * 5 % 8, **options)
        assert len({*indices}) == len(indices)
        taken += indices
    passes = [taken[start : start + size] for start in range(0, len(taken) - size, size)]
    assert all(sorted(own) == [*range(size)] for own in passes)
    assert size < 24 or all(one != two for one, two in pairwise(passes))
    assert taken[:size] != indices_of_source("b", 0, size, **options)
    in_order = indices_of_source("a", size - 1, 3, **{**options, "shuffle": False})
    assert in_order == [size - 1, 0, 1]


def sources(**changes: Any) -> dict[str, Any]:
    task = {"task": "chain_sum", "min_digits": 1, "max_digits": 1, "size": 40}
    return {
        "easy": {"procedural": {**task, "min_terms": 2, "max_terms": 2}},
        "hard": {"procedural": {**task, "min_terms": 4, "max_terms": 4}},
        **changes,
    }


def test_rows_are_of_all_sources_each_holds_some_out_and_none_of_these_is_trained_on(recipe_of: RecipeOf) -> None:
    rows = load_rows(recipe_of(queries={"sources": sources()}, evaluation={"num_queries": 9}))
    assert Counter(row.source for row in rows.train) == {"easy": 40, "hard": 40}
    assert Counter(row.source for row in rows.held_out) == {"easy": 4, "hard": 5}
    assert rows.train[0].id == "easy:1" and len({row.id for row in (*rows.train, *rows.held_out)}) == 89
    assert not {str(row.prompt) for row in rows.train} & {str(row.prompt) for row in rows.held_out}


def test_what_one_source_holds_out_no_other_trains_on(recipe_of: RecipeOf, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": str(n)}) + "\n" for n in range(30)))
    both = {"one": {"path": str(path)}, "two": {"path": str(path), "limit": 20}}
    rows = load_rows(recipe_of(queries={"sources": both}, evaluation={"num_queries": 3}))
    held_out = {row.prompt for row in rows.held_out}
    assert len(rows.held_out) == len(held_out) >= 2 and not held_out & {row.prompt for row in rows.train}


REFRESHED = {"max_prompt_tokens": 64}


@pytest.mark.parametrize(
    ("queries", "reward", "message"),
    [
        ({"sources": sources(), "limit": 3}, None, "stand in place of queries.path"),
        ({"sources": sources(), "split": "test"}, None, "split and limit, which each source has"),
        (
            {"sources": sources(other={"path": "a.jsonl", "config": "main"})},
            None,
            r"queries\.sources\.other: config is of a data set on the hub",
        ),
        ({"sources": sources(other={"limit": 3})}, None, r"queries\.sources\.other: give each a path or procedural"),
        ({"sources": sources(), "weights": {"eazy": 1}}, None, r"queries\.weights\.eazy: .*there are: easy, hard"),
        ({"sources": sources(), "weights": {"easy": 0}}, None, "at least one source needs a weight above 0"),
        (
            {"weights": {"easy": 1}, "path": "a.jsonl"},
            None,
            r"queries\.weights\.easy: the recipe has no queries\.sources",
        ),
        ({"sources": {"a": {"pth": "a.jsonl"}}}, None, r"did you mean queries\.sources\.a\.path\?"),
        ({"sources": {"a": {"path": "a.jsonl", "weight": 2}}}, None, "how often it is taken stands in queries.weights"),
        ({"sources": {"a": None}}, None, r"queries\.sources\.a: should be a section with keys such as path, config"),
        ({"sources": sources()}, [{"function": "numeric", "sources": ["easy"]}], r"judges responses of .*\.hard"),
        ({"sources": sources(), "sampler": "difficulty"}, None, "both say which queries come more often"),
        ({"sources": sources(), "refresh": "a.py:rows", **REFRESHED}, None, "its rows would be of no source"),
        ({"sources": sources(), "refresh": "file", **REFRESHED}, None, "each of the sources a path, that is a file"),
        ({"path": "openai/gsm8k", "refresh": "file", **REFRESHED}, None, "looks at data files"),
        ({"path": "a.jsonl", "refresh": "file"}, None, r"queries\.refresh needs queries\.max_prompt_tokens"),
        ({"sources": {"a.b": {"path": "a.jsonl"}}}, None, "has letters, digits, - and _ only, unlike 'a.b'"),
    ],
)
def test_what_sources_do_not_allow_is_refused(
    recipe_of: RecipeOf, queries: dict[str, Any], reward: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(queries=queries, **({"reward": reward} if reward else {}))


def test_a_source_has_as_many_queries_as_a_step_may_take_of_it(recipe_of: RecipeOf) -> None:
    few = sources(few={"procedural": {"task": "chain_sum", "min_terms": 3, "max_terms": 3, "size": 2}})
    options: dict[str, Any] = {"rollout": {"queries_per_step": 8}, "evaluation": {"num_queries": 0}}
    assert len(load_rows(recipe_of(queries={"sources": few, "weights": {"easy": 6, "few": 2}}, **options)).train) == 82
    with pytest.raises(UserError, match="takes 3 different queries and the data has 2") as error:
        load_rows(recipe_of(queries={"sources": few, "weights": {"easy": 5, "few": 3}}, **options))
    assert error.value.where == "queries.sources.few"


def test_what_is_left_out_for_its_length_must_leave_a_step_enough_of_each_source(
    recipe_of: RecipeOf, tokenizer: Any, tmp_path: Path
) -> None:
    for name, prompt in (("short", "1?"), ("long", "what is one and one and one?")):
        rows = "".join(json.dumps({"prompt": f"{n} {prompt}", "answer": "1"}) + "\n" for n in range(9))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    both = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("short", "long")}
    queries = {"sources": both, "max_prompt_tokens": 12, "overlong": "filter"}
    recipe = recipe_of(queries=queries, rollout={"queries_per_step": 4}, evaluation={"num_queries": 0})
    with pytest.raises(UserError, match=r"of 2 queries of queries\.sources\.long that a step takes 0 are left"):
        render_rows(load_rows(recipe), tokenizer, recipe=recipe, max_positions=None)


def test_an_evaluations_own_file_is_read_once_and_as_the_recipe_says(recipe_of: RecipeOf, tmp_path: Path) -> None:
    for name, column in (("one", "prompt"), ("two", "problem"), ("test", "prompt")):
        lines = "".join(json.dumps({column: f"{n} of {name if n else 'all'}", "answer": "1"}) + "\n" for n in range(9))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    both = {
        "one": {"path": str(tmp_path / "one.jsonl")},
        "two": {"path": str(tmp_path / "two.jsonl"), "prompt": "problem"},
    }
    evaluation = {"path": str(tmp_path / "test.jsonl"), "num_queries": 5}
    rows = load_rows(recipe_of(queries={"sources": both}, evaluation=evaluation))
    assert [row.id for row in rows.held_out] == [f"test.jsonl:{n}" for n in range(1, 6)]
    assert Counter(row.source for row in rows.train) == {"one": 8, "two": 8}  # not what is asked there


def test_a_source_may_be_a_path_alone_and_null_means_none(recipe_of: RecipeOf) -> None:
    recipe = recipe_of(queries={"sources": {"a": "a.jsonl", 2: {"path": "b.jsonl"}}})
    assert {name: own.path for name, own in recipe.queries.sources.items()} == {"a": "a.jsonl", "2": "b.jsonl"}
    assert recipe_of(queries={"sources": None, "weights": None}).queries.sources == {}
