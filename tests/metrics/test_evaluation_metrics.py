"""An evaluation's numbers under their names, and the line that tells of them."""

import math
from typing import Any

import pytest

from gspo.evaluation.held_out import Estimate, Numbers, estimate
from gspo.metrics.step import evaluation_metrics
from gspo.run.summary import evaluation_summary, failure_summary

HALF = estimate([[1.0], [0.0]] * 32)


def numbers_of(passed: Estimate = HALF, reward: Estimate = HALF, **changed: Any) -> Numbers:
    return {
        "pass_at_1": passed.mean,
        "error_over_questions": passed.error_over_questions,
        "error_over_samples": passed.error_over_samples,
        "num_questions": passed.num_questions,
        "pass_at_k": {"1": passed.mean},
        "reward_mean": reward.mean,
        "reward_error": reward.error_over_questions,
        "function_means": {"math": 0.5},
        "num_responses": 64,
        "num_judged_by": {"math": 64},
        "num_unjudged": 0,
        "num_failed": 0,
        "num_masked": 0,
        "first_failure": None,
        "mean_response_tokens": 7.0,
        "truncated_fraction": 0.25,
        **changed,
    }


def metrics_of(numbers: Numbers, name: str = "held_out") -> dict[str, Any]:
    return evaluation_metrics(numbers, {}, name)


def told(**changed: Any) -> str:
    numbers = numbers_of(**changed)
    return evaluation_summary(numbers, metrics_of(numbers))


def test_a_set_of_rewards_of_0_and_1_is_told_by_pass_at_1_alone() -> None:
    assert told() == "0.500 ± 0.063 on 64 held-out queries"


@pytest.mark.parametrize(("value", "size", "queries"), [(1.0, 1, "query"), (1.0, 2, "queries"), (0.0, 512, "queries")])
def test_no_error_is_told_where_there_is_none(value: float, size: int, queries: str) -> None:
    alike = estimate([[value]] * size)
    assert told(passed=alike, reward=alike) == f"{value:.3f} on {size} held-out {queries}"


def test_a_reward_that_is_not_0_or_1_is_told_too() -> None:
    marks = estimate([[6.0], [8.0]])
    assert told(passed=estimate([[0.0]] * 2), reward=marks) == "0.000 on 2 held-out queries, reward 7.000 ± 1.000"


def test_where_several_functions_judge_it_is_told_how_many_each() -> None:
    assert told(num_judged_by={"math": 60, "format": 4}).endswith(" queries; judged by math: 60, format: 4")


def test_what_no_function_judges_is_counted() -> None:
    nothing = estimate([[]])
    assert told(num_unjudged=16).endswith("; no reward function applies to 16 of 64 responses: left out")
    assert told(passed=nothing, reward=nothing, num_unjudged=64).startswith("– on 0 held-out queries; no reward")


def test_failures_are_told_with_the_first_one_which_no_terminal_obeys() -> None:
    assert failure_summary(numbers_of()) == ""
    failed = numbers_of(num_failed=20, num_masked=30, first_failure="reward function f: \x1b[2J (row q:1)")
    assert failure_summary(failed) == (
        "reward functions failed on some of 64 held-out responses: 20 count as not passed, 30 have no reward; "
        "the first: reward function f: ␛[2J (row q:1)"
    )
    assert metrics_of(failed, "x")["evaluation/x/failed_fraction"] == 20 / 64


def test_every_evaluation_of_a_run_has_the_same_names() -> None:
    several = {"math": 0.5, "format": math.nan}
    full, empty = numbers_of(function_means=several), numbers_of(passed=estimate([[]]), function_means=several)
    names = metrics_of(full).keys()
    assert names == metrics_of(empty).keys()
    assert {"evaluation/held_out/math/mean", "evaluation/held_out/format/mean"} <= names
    assert not any(name.endswith("/mean") for name in metrics_of(numbers_of()))
