"""The math reward takes every spelling of the right answer, and nothing else; what it costs, only itself pays."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.reward.math_pairs import ROWS, Row

from gspo.reward.builtin import math


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.suite}-{row.verdict}-{row.gold}-{row.reason}")
def test_the_verdicts_are_those_of_the_table(row: Row) -> None:
    completions = row.completions
    rewards = math(["q"] * len(completions), completions, answer=[row.gold] * len(completions))
    right = float(row.verdict == "right")
    assert [text for text, reward in zip(completions, rewards, strict=True) if reward != right] == []


def test_no_pair_of_the_table_is_there_twice() -> None:
    pairs = [(row.gold, completion) for row in ROWS for completion in row.completions]
    assert len(set(pairs)) == len(pairs) > 2_000


@pytest.mark.parametrize("gold", sorted({row.gold for row in ROWS}))
def test_every_gold_answer_is_its_own(gold: str) -> None:
    for completion in (f"<answer>{gold}</answer>", f"\\boxed{{{gold}}}", f"so\n\\[\\boxed{{{gold}}}\\]"):
        assert math(["q"], [completion], answer=[gold]) == [1.0]


@pytest.mark.parametrize("gold", [None, "", " \n", float("nan"), []])
def test_an_empty_cell_is_no_right_answer(gold: object) -> None:
    assert math(["q"] * 2, ["", "<answer></answer>"], answer=[gold] * 2) == [None, None]


def test_golds_that_are_no_texts() -> None:
    completions = ["\\boxed{42}", "\\boxed{42}", "\\boxed{0.5}", "\\boxed{[1, 2]}", "\\boxed{43}"]
    assert math(["q"] * 5, completions, answer=[42, 42.0, 0.5, [1, 2], 42]) == [1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("gold", [["43", "42"], ["42", ""], [42], ("42",)])
def test_any_of_a_list_of_texts_is_right(gold: object) -> None:
    assert math(["q"] * 2, ["\\boxed{42}", "\\boxed{7}"], answer=[gold] * 2) == [1.0, 0.0]
    assert math(["q"], ["\\boxed{42}"], answer=[["", " "]]) == [None]


def test_in_many_threads_it_gives_what_one_gives() -> None:
    pairs = [(str(number), f"\\boxed{{{number + number % 3}}}") for number in range(60)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda pair: math(["q"], [pair[1]], answer=[pair[0]])[0], pairs))
    assert found == [float(number % 3 == 0) for number in range(60)]


@pytest.mark.parametrize("hostile", ["9^{9^{9^9}}", "\\sqrt{" * 600 + "2" + "}" * 600, "(" * 5000, "1e999999999"])
def test_a_completion_that_never_ends_costs_only_itself(hostile: str) -> None:
    completions = ["\\boxed{7}", f"\\boxed{{{hostile}}}", "\\boxed{7}"]
    assert math(["q"] * 3, completions, answer=["7"] * 3, seconds_per_answer=0.5) == [1.0, 0.0, 1.0]


def test_it_reads_all_of_a_long_completion() -> None:
    long = "1+" * 10_000
    completions = [f"{long} so \\boxed{{7}}", f"\\boxed{{7}} {long}.", f"<answer>7</answer>{long}"]
    assert math(["q"] * 3, completions, answer=["7"] * 3) == [1.0] * 3
    cut_short = ["\\boxed{12345}" + "." * 4_000, "\\boxed{-5}" + "." * 4_000, "-5" + " " * 4_000]
    assert math(["q"] * 3, cut_short, answer=["45", "5", "5"]) == [0.0] * 3
