"""The built-in rewards: gold answers score, junk does not, and hostile completions cost only themselves."""

from typing import Any

import pytest
from tests.samples import scores_of

from gspo.errors import UserError
from gspo.recipe.sections import RewardConfig
from gspo.reward.builtin import exact_match, format_match, math, reasoning_gym
from gspo.reward.functions import load_functions
from gspo.reward.score import score


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        (" 14\n", "14", 1.0),
        ("7+7=14 <answer> 14 </answer>", "14", 1.0),
        ("<answer>13</answer> no, <answer>14</answer>", 14, 1.0),
        ("<answer>14</answer> no, <answer>13</answer>", "14", 0.0),
        ("it is 14", "14", 0.0),
        ("", "14", 0.0),
        ("14", None, None),
        ("", "", None),
        ("<answer></answer>", " ", None),
        ("nan", float("nan"), None),
        ("[]", [], None),
        ("42", 42.0, 1.0),
        ("42.0", 42.0, 1.0),
        ("0.5", 0.5, 1.0),
        ("42", "42.0", 0.0),
        ("b", ["a", "b"], 1.0),
        ("c", ["a", "b"], 0.0),
        ("", ["", "a"], 0.0),
        ("True", True, 1.0),
        ([{"role": "assistant", "content": "14"}], "14", 1.0),
    ],
)
def test_exact_match(completion: Any, gold: Any, reward: float | None) -> None:
    assert exact_match(["q"], [completion], answer=[gold]) == [reward]
    assert exact_match(["q"], [completion], answer_column="gold", gold=[gold]) == [reward]


@pytest.mark.parametrize("gold", [{"target": ["a"]}, [{"target": "a"}]])
def test_an_answer_that_no_response_can_be_equal_to_is_refused(gold: Any) -> None:
    for function in (exact_match, math):
        with pytest.raises(UserError, match=r"the column 'answer' holds .*target.*: a mapping"):
            function(["q"], ["a"], answer=[gold])


@pytest.mark.parametrize(
    ("pattern", "options", "completion", "reward"),
    [
        (r"<answer>.+</answer>", {}, "so\n<answer>1\n2</answer>!", 1.0),
        (r"<answer>.+</answer>", {}, "<answer></answer>", 0.0),
        (r"<answer>.+</answer>", {"full_match": True}, "so <answer>1</answer>", 0.0),
        (r"<answer>.+</answer>", {"full_match": True}, "<answer>1</answer>", 1.0),
    ],
)
def test_format(pattern: str, options: dict[str, Any], completion: str, reward: float) -> None:
    assert format_match(["q"], [completion], pattern=pattern, **options) == [reward]


def test_a_bad_pattern_is_one_message_and_a_missing_one_too(groups: Any) -> None:
    with pytest.raises(UserError, match="not a regular expression"):
        score(groups(["x"]), load_functions([RewardConfig(function="format", options={"pattern": "(x"})]))
    with pytest.raises(UserError, match=r"format, row data:1: it needs pattern(.|\n)*options"):
        score(groups(["x"]), load_functions([RewardConfig(function="format")]))


def test_the_verifier_knows_the_tasks_options() -> None:
    # decimal_arithmetic rounds to its own option's places before it compares.
    entry = {"answer": "0.33333", "metadata": {}}
    for places, reward in ((2, 1.0), (5, 0.0)):
        options = {"max_num_decimal_places": places, "min_num_decimal_places": 2}
        found = reasoning_gym(["q"], ["0.33"], task=["decimal_arithmetic"], entry=[entry], task_options=[options])
        assert (found == [1.0]) == (reward == 1.0)


@pytest.mark.parametrize("name", ["exact_match", "math"])
def test_a_missing_answer_column_names_those_there(name: str, groups: Any) -> None:
    with pytest.raises(UserError, match=r"'answer'; the columns there are: gold(.|\n)*answer_column"):
        score(groups(["x"], gold=["x"]), load_functions([RewardConfig(function=name)]))
    scored = score(
        groups(["7"], gold=["7"]), load_functions([RewardConfig(function=name, options={"answer_column": "gold"})])
    )
    assert scores_of(scored)[0].reward == 1.0
