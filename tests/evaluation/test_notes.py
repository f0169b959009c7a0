"""What is said of an evaluation before a run: few queries, a threshold that right answers miss or junk reaches."""

from typing import Any

import pytest

from gspo.evaluation.held_out import evaluation_notes
from gspo.recipe.load import make_recipe
from gspo.recipe.schema import Recipe
from gspo.reward.functions import JUNK
from gspo.types import Score

Parts = dict[str, float | None]


def recipe_of(queries: dict[str, Any] | None = None, **evaluation: Any) -> Recipe:
    tree = {"name": "e", "steps": 1, "model": {"path": "m"}, "queries": queries or {}, "evaluation": evaluation}
    return make_recipe(tree)


def notes(gold: Parts | None, junk: Parts, threshold: float = 1.0) -> str:
    pairs = [(JUNK, junk) if gold is None else ("42", gold), (JUNK, junk)]
    probed = [(text, Score(reward=None, parts=parts)) for text, parts in pairs]
    return "\n".join(evaluation_notes(recipe_of(pass_threshold=threshold), 512, probed))


def test_numbers_that_all_stay_below_the_threshold_get_a_word_though_junk_has_the_larger() -> None:
    said = notes({"f": 0.01}, {"f": 0.14}, 5.0)
    assert "answer 0.01 and junk 0.14" in said and "evaluation.pass_threshold is 5" in said


@pytest.mark.parametrize(
    ("gold", "junk", "threshold"),
    [
        ({"f": 1.0}, {"f": 0.0}, 1.0),
        ({"f": 10.0}, {"f": 0.0}, 8.0),
        ({"f": 0.0}, {"f": 0.0}, 1.0),  # does not know the bare answer: it may ask for another form
        ({"f": None}, {"f": None}, 1.0),
        ({"f": None, "g": 1.0}, {"f": None, "g": 0.0}, 1.0),
        ({"f": 1.0, "form": 0.0}, {"f": 0.0, "form": 1.0}, 1.0),  # form does not judge
        (None, {"f": 0.0}, 1.0),  # without an answer nothing is known of what a right response gets,
        (None, {"f": 1.0}, 1.0),  # and junk may happen to be one
    ],
)
def test_a_threshold_that_fits_or_of_which_nothing_is_known_gets_no_word(
    gold: Parts | None, junk: Parts, threshold: float
) -> None:
    assert notes(gold, junk, threshold) == ""


@pytest.mark.parametrize(
    ("gold", "junk", "threshold", "said"),
    [
        ({"f": 0.5}, {"f": 0.0}, 1.0, "f gives the row's own answer 0.5, and evaluation.pass_threshold is 1"),
        ({"f": 10.0}, {"f": 0.0}, 12.5, "f gives the row's own answer 10, and evaluation.pass_threshold is 12.5"),
        ({"f": None, "g": 0.5}, {"f": None, "g": None}, 1.0, "g gives the row's own answer 0.5"),
        ({"f": 10.0}, {"f": 2.0}, 1.0, "f gives junk 2, and evaluation.pass_threshold is 1"),
        ({"f": 10.0}, {"f": 1.0}, 1.0, "f gives junk 1"),
        ({"f": 0.0}, {"f": 1.0}, 1.0, "f gives junk 1"),
        (None, {"f": 14.0}, 1.0, "f gives junk 14"),
    ],
)
def test_a_threshold_out_of_reach_or_within_that_of_junk_is_named_with_function_and_value(
    gold: Parts | None, junk: Parts, threshold: float, said: str
) -> None:
    (line,) = notes(gold, junk, threshold).splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("settings", "num_held_out", "said"),
    [
        ({"num_queries": 16}, 2, "2 rows are held out for evaluation, not the 16 of evaluation.num_queries"),
        ({}, 1, "1 row is held out for evaluation, not the 512 of evaluation.num_queries"),
        ({"num_queries": 2}, 2, ""),
        ({"num_queries": 16, "path": "exam.jsonl"}, 2, ""),  # all that there is
        ({"num_queries": 0}, 0, ""),
    ],
)
def test_fewer_rows_than_asked_for_are_named_with_the_way_to_more(
    settings: dict[str, Any], num_held_out: int, said: str
) -> None:
    fits = [("42", Score(reward=1.0, parts={"f": 1.0})), (JUNK, Score(reward=0.0, parts={"f": 0.0}))]
    found = "\n".join(evaluation_notes(recipe_of(**settings), num_held_out, fits))
    assert found.startswith(said) and bool(found) == bool(said)
    assert not said or ("evaluation.path" in found and f"evaluation.num_queries={num_held_out}" in found)


def test_where_nothing_is_evaluated_nothing_is_said() -> None:
    misses = [("42", Score(reward=0.5, parts={"f": 0.5})), (JUNK, Score(reward=2.0, parts={"f": 2.0}))]
    assert evaluation_notes(recipe_of(num_queries=0), 0, misses) == []
    assert len(evaluation_notes(recipe_of(), 512, misses)) == 1
