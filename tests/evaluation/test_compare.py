"""Two models on one suite: the paired difference and its errors from their equations, and what cannot be compared."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.evaluation.compare import compare, sign_test

Passed = Mapping[str, Sequence[bool | None]]


def evaluated(passed: Passed, *, name: str = "model", data: str = "d1", **settings: Any) -> dict[str, Any]:
    """An evaluation on the suite `sums` in which each question's responses passed so."""
    responses = [
        {"query": query, "sample": number, "prompt": f"What is {query}?", "passed": own}
        for query, row in passed.items()
        for number, own in enumerate(row)
    ]
    suite = {
        "settings": {"samples": 2, "temperature": 1.0, "queries": {"template": None}, **settings},
        "data": {"path": f"{data}.jsonl", "num_rows": len(passed), "sha256": data},
        "responses": responses,
    }
    return {"model": {"name": name}, "suites": {"sums": suite}}


def numbered(rows: Sequence[Sequence[bool]]) -> Passed:
    return {f"q:{number}": row for number, row in enumerate(rows)}


def test_difference_and_errors_are_those_of_the_equations() -> None:
    first = {"a": [True, False, False], "b": [False, False], "c": [True, True], "d": [True, False]}
    second = {"d": [True, False, True, False], "c": [False, True], "b": [True, True], "a": [True, True, False]}
    shown = compare(evaluated(first), evaluated(second, samples=4), "sums")
    differences = [2 / 3 - 1 / 3, 1.0 - 0.0, 0.5 - 1.0, 0.5 - 0.5]
    assert shown["mean"] == pytest.approx(sum(differences) / 4)
    assert shown["error_over_questions"] == pytest.approx(statistics.stdev(differences) / math.sqrt(4))
    variances = [2 / 9 / 2 + 2 / 9 / 2, 0.0, 0.25 / 1, 0.25 / 1 + 0.25 / 3]  # p̂ (1 − p̂)/(n − 1) of both models
    assert shown["error_over_samples"] == pytest.approx(math.sqrt(sum(variances)) / 4)
    assert (shown["num_questions"], shown["won"], shown["lost"]) == (4, ("a", "b"), ("c",))


def test_only_questions_with_judged_responses_of_both_count() -> None:
    first: Passed = {"a": [True], "b": [False], "c": [None], "d": [False]}
    second: Passed = {"a": [True, None], "b": [True], "c": [True], "e": [True]}
    shown = compare(evaluated(first), evaluated(second), "sums")
    assert (shown["mean"], shown["num_questions"], shown["num_left_out"]) == (0.5, 2, 3)
    assert (shown["won"], shown["lost"]) == (("b",), ()) and math.isnan(shown["error_over_samples"])


def test_rows_with_one_prompt_are_one_question() -> None:
    first = evaluated({f"{prompt}{n}": [n > 1] for prompt in "ab" for n in range(4)})
    second = evaluated({f"{prompt}{n}": [prompt == "a"] for prompt in "ab" for n in range(4)})
    for tree in (first, second):
        for response in tree["suites"]["sums"]["responses"]:
            response["prompt"] = f"What is {response['query'][0]}?"
    shown = compare(first, second, "sums")
    assert (shown["num_questions"], shown["won"], shown["lost"]) == (2, ("a0",), ("b0",))
    assert shown["error_over_questions"] == pytest.approx(statistics.stdev([0.5, -0.5]) / math.sqrt(2))


def test_models_that_agree_everywhere_have_no_error_that_says_so_is_certain() -> None:
    same = evaluated({"a": [True], "b": [False]})
    shown = compare(same, same, "sums")
    assert (shown["mean"], shown["sign_test"]) == (0.0, 1.0) and math.isnan(shown["error_over_questions"])


def drawn(dice: random.Random, num_questions: int, gain: float) -> tuple[list[list[bool]], list[list[bool]]]:
    """Four samples of each question by a model and by one that passes more often, on questions of any difficulty."""
    rates = [dice.uniform(0.0, 1.0 - gain) for _ in range(num_questions)]
    first, second = ([[dice.random() < rate + more for _ in range(4)] for rate in rates] for more in (0.0, gain))
    return first, second


def test_the_errors_cover_the_true_difference_and_pairing_beats_the_errors_of_each() -> None:
    dice, gain, num_covered, num_smaller = random.Random(3), 0.1, 0, 0
    for _ in range(400):
        first, second = drawn(dice, 60, gain)
        found = compare(evaluated(numbered(first)), evaluated(numbered(second)), "sums")
        num_covered += abs(found["mean"] - gain) < 1.96 * found["error_over_questions"]
        unpaired = [statistics.variance([statistics.fmean(row) for row in rows]) / 60 for rows in (first, second)]
        num_smaller += found["error_over_questions"] < 0.9 * math.sqrt(sum(unpaired))
    assert 0.92 < num_covered / 400 < 0.98 and num_smaller > 390


def test_the_sign_test_is_exact() -> None:
    assert sign_test(0, 0) == sign_test(3, 3) == 1.0
    assert sign_test(1, 5) == sign_test(5, 1) == pytest.approx(2 * (1 + 6) / 64)
    # A chance level of at most 5 %, and no test is exact that stays far below it with so many questions.
    size = 1001
    rejected = sum(math.comb(size, won) for won in range(size + 1) if sign_test(won, size - won) <= 0.05) / 2**size
    assert 0.04 < rejected <= 0.05


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (evaluated({"a": [True]}, data="d2"), ["d1.jsonl", "d2.jsonl"]),
        (evaluated({"a": [True]}, temperature=0.6), ["temperature 1.0 and 0.6"]),
        (evaluated({"a": [True]}, queries={"template": "{prompt}!"}), ['queries.template null and "{prompt}!"']),
        (evaluated({"b": [True]}), ["no question"]),
    ],
)
def test_what_differs_is_named(other: dict[str, Any], named: Sequence[str]) -> None:
    with pytest.raises(UserError) as error:
        compare(evaluated({"a": [True]}), other, "sums")
    assert all(words in str(error.value) for words in named)


def test_a_question_that_another_chat_template_surrounds_is_the_same_question() -> None:
    other = evaluated({"a": [True], "b": [True]})
    other["suites"]["sums"]["responses"][1]["prompt"] = "user: What is b? assistant:"
    assert compare(evaluated({"a": [True], "b": [False]}), other, "sums")["won"] == ("b",)
