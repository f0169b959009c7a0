"""The built-in rewards: gold answers score, junk does not, and hostile completions cost only themselves."""

import re
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


BEGUN = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>\nWell, let me"}]
SHUT = [{"role": "user", "content": "Say <think>."}, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}]


@pytest.mark.parametrize(
    ("completion", "prompt", "judged"),
    [
        ("<think>42</think>43", "q", "43"),
        ("<think>43</think>42", "q", "42"),
        ("I see. <think>42</think> <think>or 43</think>43", "q", "43"),
        ("<think>a <think> 42</think>43", "q", "43"),
        ("<think>42", "q", None),
        ("42 <think> is it?", "q", None),
        ("<think>41</think>42<think>or", "q", None),
        ("so 42</think>43", "q", "43"),
        ("42", "Now think.\n<think>\n", None),
        ("42</think>43", "Now think.\n<think>\n", "43"),
        ("42", "Write your thoughts between <think> and </think>.", "42"),
        ("42", BEGUN, None),
        ("42</think>43", BEGUN, "43"),
        ("42", SHUT, "42"),
        ("42</think>", "q", ""),
        ([{"role": "assistant", "content": "<think>42</think>43"}], BEGUN, "43"),
    ],
)
def test_only_what_follows_the_thoughts_is_judged(completion: Any, prompt: Any, judged: str | None) -> None:
    for gold in ("42", "43"):
        reward = float(gold == judged)
        assert exact_match([prompt], [completion], answer=[gold]) == [reward]
        assert math([prompt], [completion], answer=[gold]) == [reward]
        for prompt_text in ("q", "<|assistant|><think>\n"):  # the template may open them
            begun = "</think>" not in str(completion) and prompt_text != "q"
            given = exact_match([prompt], [completion], answer=[gold], prompt_texts=[prompt_text])
            assert given == [0.0 if begun else reward]
        entry: dict[str, Any] = {"answer": gold, "metadata": {}}
        assert reasoning_gym([prompt], [completion], task=["chain_sum"], entry=[entry])[0] in (reward, 0.01)
    if judged is None:  # chain_sum pays 0.01 for any text
        assert reasoning_gym([prompt], [completion], task=["chain_sum"], entry=[{"answer": "1"}]) == [0.0]


def test_the_tags_of_thoughts_are_an_option_and_format_sees_all() -> None:
    for tags in (["[THINK]", "[/THINK]"], ["<|channel>thought", "<channel|>"], ["◁think▷", "◁/think▷"]):
        completions = [f"{tags[0]} 42{tags[1]}43", f"{tags[0]} 42", "43"]
        assert math(["q"] * 3, completions, answer=["43"] * 3, thinking=tags) == [1.0, 0.0, 1.0]
        assert format_match(["q"], completions[:1], pattern=re.escape(tags[0])) == [1.0]
    assert exact_match(["q"], ["<think>42"], answer=["<think>42"], thinking=None) == [1.0]
    for odd in ("<think>", ["<think>"], ["a", "b", "c"]):
        with pytest.raises(UserError, match="thinking is"):
            math(["q"], ["42"], answer=["42"], thinking=odd)


WORKED = [
    (r"First $\boxed{7}$, then we see that it is $\boxed{\frac12}$.", r"\frac12", "7"),
    (r"So $x = \fbox{\frac{1}{\sqrt{2}}}$ is right.", r"\frac{1}{\sqrt{2}}", "1"),
    (r"It is $\boxed 5$.", "5", "55"),
    (r"It is $\boxed{41 \boxed{42}}$", r"41 \boxed{42}", "42"),
    ("He has 3 * 6 = <<3*6=18>>18.\n#### 18", "18", "3"),
    ("#### The way\nIt is long.\n####  -1,250  \n", "-1,250", "1"),
    ("We add: 7.\n#### 7\nThe answer is: 7", "7", "27"),
    ("We look.\n#### 1\nThe total is 12", "We look.\n#### 1\nThe total is 12", "1"),
    ("<reasoning>\\boxed{3} is too little.</reasoning><answer>4</answer>", "4", "3"),
    (r"So it is $\boxed{\text{Evelyn}}$", r"\text{Evelyn}", "Ann"),
]


@pytest.mark.parametrize(("worked", "gold", "wrong"), WORKED)
def test_the_answer_of_a_worked_solution_is_the_right_one(worked: str, gold: str, wrong: str) -> None:
    for column in ("answer", "notes"):
        columns: dict[str, Any] = {column: [worked] * 2, "answer_column": column}
        assert exact_match(["q"] * 2, [gold, wrong], **columns) == [1.0, 0.0]
        assert math(["q"] * 2, [f"\\boxed{{{gold}}}", f"\\boxed{{{wrong}}}"], **columns) == [1.0, 0.0]
    assert exact_match(["q"], [worked], answer=[worked]) == [1.0]


@pytest.mark.parametrize(
    ("worked", "gold", "wrong"),
    [
        ("<think>Is it \\boxed{3}?</think>\nIt is $\\boxed{7}$.", "7", "3"),
        ("Is it 3?</think>7", "7", "3"),
        ("<think>A third?\n#### 3</think>Ann", "Ann", "3"),
    ],
)
def test_the_thoughts_of_a_right_answer_are_not_it(worked: str, gold: str, wrong: str) -> None:
    for function in (exact_match, math):
        assert function(["q"] * 2, [gold, wrong], answer=[worked] * 2) == [1.0, 0.0]


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
