"""Procedural queries: distinct, different for each seed, never held out and trained on."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.queries.source import load_rows, procedural_rows
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ProceduralConfig


def prompts(rows: Any) -> list[str]:
    return [row.prompt for row in rows]


def questions(config: ProceduralConfig, *, seed: int | None, **options: Any) -> list[str]:
    return prompts(procedural_rows(config, seed=seed, **{"size": config.size, **options}))


def test_rows_are_distinct_reproducible_and_carry_what_the_verifier_needs(
    chain_sum: dict[str, Any], recipe_of: Callable[..., Recipe]
) -> None:
    recipe = recipe_of(queries={"procedural": chain_sum}, evaluation={"num_queries": 0})
    rows = load_rows(recipe).train
    assert len(set(prompts(rows))) == len(rows) == 300
    assert rows == load_rows(recipe).train
    assert [row.id for row in rows] == [f"chain_sum:{number}" for number in range(1, 301)]
    assert all(row.is_procedural for row in rows)
    assert all(row.columns["entry"]["question"] == row.prompt for row in rows)
    assert rows[0].columns["task_options"] == {k: v for k, v in chain_sum.items() if k not in ("task", "size")}
    assert pickle.loads(pickle.dumps(rows)) == rows
    json.dumps([dict(row.columns) for row in rows])


def test_seeds_are_far_apart(chain_sum: dict[str, Any]) -> None:
    # Neighbouring seeds of the task itself share all items but one; a large space makes chance overlaps rare.
    procedural = ProceduralConfig(**{**chain_sum, "min_digits": 6, "max_digits": 6})
    drawn = [set(questions(procedural, seed=seed)) for seed in (None, 0, 1, 2)]  # None: those held out
    assert len(set.union(*drawn)) == sum(map(len, drawn))


def test_held_out_is_the_same_for_every_seed_and_disjoint_from_training(
    chain_sum: dict[str, Any], recipe_of: Callable[..., Recipe]
) -> None:
    sets = [
        load_rows(recipe_of(seed=seed, queries={"procedural": chain_sum}, evaluation={"num_queries": 100}))
        for seed in (0, 1)
    ]
    assert sets[0].held_out == sets[1].held_out
    assert len(sets[0].held_out) == 100
    assert prompts(sets[0].train) != prompts(sets[1].train)
    for rows in sets:
        assert not set(prompts(rows.train)) & set(prompts(rows.held_out))


def test_a_small_task_gives_what_it_has(chain_sum: dict[str, Any], recipe_of: Callable[..., Recipe]) -> None:
    small = {**chain_sum, "min_terms": 2, "max_terms": 2, "size": 1000}
    rows = load_rows(recipe_of(queries={"procedural": small}, evaluation={"num_queries": 50}))
    assert len(rows.held_out) == 50
    assert 100 < len(rows.train) <= 2 * 10 * 10 - 50
    with pytest.raises(UserError, match=r"data has 0 for training(.|\n)*evaluation\.num_queries"):
        load_rows(recipe_of(queries={"procedural": small}, evaluation={"num_queries": 5000}))


def test_no_held_out_rows_are_drawn_where_none_are_wanted(chain_sum: dict[str, Any]) -> None:
    assert questions(ProceduralConfig(**chain_sum), seed=None, size=0) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "chain_sums"}, "did you mean chain_sum"),
        ({"min_term": 3}, "min_terms, max_terms, min_digits"),
        ({"min_terms": 9}, "max_terms must be >= min_terms"),
        ({"min_terms": "three"}, "refuses its options"),
        ({"seed": 4}, "comes from the recipe"),
    ],
)
def test_bad_tasks_and_options_say_what_is_there(changes: dict[str, Any], said: str, chain_sum: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=said):
        questions(ProceduralConfig(**{**chain_sum, **changes}), seed=0)
