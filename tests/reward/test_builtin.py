"""The built-in rewards: gold answers score, junk does not, and hostile completions cost only themselves."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gspo.config import Reward
from gspo.errors import UserError
from gspo.reward.builtin import exact_match, format_match, reasoning_gym
from gspo.reward.functions import load_functions
from gspo.reward.math import math
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
        ([{"role": "assistant", "content": "14"}], "14", 1.0),
    ],
)
def test_exact_match(completion: Any, gold: Any, reward: float | None) -> None:
    assert exact_match(["q"], [completion], answer=[gold]) == [reward]
    assert exact_match(["q"], [completion], answer_column="gold", gold=[gold]) == [reward]


@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        ("64", "So 72-8=64 are left.\n#### 64", 1.0),
        ("5000", "It pays \\boxed{5,000}", 1.0),
        ("-2", "<answer>-2</answer>", 1.0),
        ("1/2", "$\\frac{1}{2}$", 1.0),
        ("\\frac{1}{2}", "so it is 0.5", 1.0),
        ("x^2+1", "<answer>1+x^2</answer>", 1.0),
        ("[0, 1]", "\\boxed{[0,1]}", 1.0),
        ("64", "65", 0.0),
        ("64", "The answer is 64 <answer>65</answer>", 0.0),
        ("64", "", 0.0),
        ("64", "pelican", 0.0),
        ("", "64", None),
    ],
)
def test_math(gold: str, completion: str, reward: float | None) -> None:
    assert math(["q"], [completion], answer=[gold]) == [reward]


def test_math_in_many_threads_gives_what_one_gives() -> None:
    pairs = [(str(number), f"\\boxed{{{number + number % 3}}}") for number in range(60)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda pair: math(["q"], [pair[1]], answer=[pair[0]])[0], pairs))
    assert found == [float(number % 3 == 0) for number in range(60)]


def test_a_completion_that_never_ends_in_sympy_costs_only_itself() -> None:
    completions = ["\\boxed{7}", "\\boxed{9^{9^{9^9}}}", "\\boxed{7}"]
    assert math(["q"] * 3, completions, answer=["7"] * 3, seconds_per_answer=0.5) == [1.0, 0.0, 1.0]


def test_math_reads_the_end_of_a_long_completion() -> None:
    assert math(["q"], ["1+" * 10_000 + " so \\boxed{7}"], answer=["7"]) == [1.0]


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
        score(groups(["x"]), load_functions([Reward(function="format", options={"pattern": "(x"})]))
    with pytest.raises(UserError, match=r"format, row data:1: it needs pattern(.|\n)*options"):
        score(groups(["x"]), load_functions([Reward(function="format")]))


@pytest.mark.parametrize("task", ["chain_sum", "decimal_arithmetic", "countdown", "knights_knaves"])
def test_reasoning_gyms_verifiers_take_gold_and_refuse_junk(task: str) -> None:
    from reasoning_gym.factory import create_dataset

    entry = create_dataset(task, seed=3, size=1)[0]
    gold = entry["answer"]
    completions = [f"thinking <answer>{gold}</answer>", gold, "<answer>pelican</answer>", ""]
    scores = reasoning_gym(["q"] * 4, completions, task=[task] * 4, entry=[entry] * 4)
    assert scores[:2] == [1.0, 1.0]
    assert max(scores[2:]) < 0.5


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
        score(groups(["x"], gold=["x"]), load_functions([Reward(function=name)]))
    scored = score(
        groups(["7"], gold=["7"]), load_functions([Reward(function=name, options={"answer_column": "gold"})])
    )
    assert scored.scores[0].reward == 1.0
