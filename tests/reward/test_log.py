"""What reward functions log: means over the step's values, columns of cells; what cannot be taken costs no reward."""

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.samples import scores_of

from gspo.errors import UserError
from gspo.metrics.step import logged_metrics
from gspo.reward.reply import MAX_NAMES, MAX_TEXT, Log, Reply
from gspo.reward.score import added_up, score


def test_a_metric_is_the_mean_of_all_values_of_the_step(groups: Any, functions: Any) -> None:
    def logs(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        for text in completions:
            log_metric("len", np.float32(len(text)))
        log_metric("calls", torch.tensor([True]))
        return [0.0] * len(completions)

    logged = score(groups(["a", "bbb"], ["cc"]), functions(logs)).logged
    assert logged == {"f0/calls": (2.0, 2), "f0/len": (6.0, 3)}
    assert logged_metrics(logged) == {"logged/f0/calls": 1.0, "logged/f0/len": 2.0}
    assert list(logged_metrics(logged, "evaluation/a/")) == [
        "evaluation/a/logged/f0/calls",
        "evaluation/a/logged/f0/len",
    ]


def test_the_order_in_which_calls_finish_is_not_in_the_last_digit() -> None:
    rng = random.Random(0)
    calls = [{"f/x": (rng.gauss(0, 1) * 10 ** rng.randint(-8, 8), 1)} for _ in range(200)]
    exact = float(sum(Fraction(call["f/x"][0]) for call in calls))
    for _ in range(5):
        rng.shuffle(calls)
        assert added_up(calls) == {"f/x": (exact, 200)}


def test_a_column_has_a_cell_for_each_completion() -> None:
    log = Log(3)
    log.extra("text", ["a", "b" * 2 * MAX_TEXT, "\ud800"])
    log.extra("mixed", np.array([1.5, math.nan, 2.0]))
    log.extra("parts", (1, None, {"b": 2}))
    log.extra("numbers", [10**400, True, torch.tensor([[3]])])
    assert log.columns == {
        "text": ["a", "b" * MAX_TEXT, "\\ud800"],
        "mixed": [1.5, None, 2.0],
        "parts": [1, None, "{'b': 2}"],
        "numbers": [None, True, 3],
    }
    assert not log.refused


REFUSED = {
    "log.metric('x', math.nan)": "nan is no finite number",
    "log.metric('x', -math.inf)": "no finite number",
    "log.metric('x', 10**400)": "no finite number",
    "log.metric('x', 'much')": "'much' is no finite number",
    "log.metric('x', 1j)": "no finite number",
    "log.metric('x', [1.0, 2.0])": "no finite number",
    "log.metric('', 1)": "a name has 64 letters",
    "log.metric('$tensor', 1)": "a name has 64 letters",
    "log.metric('a\\nb', 1)": "a name has 64 letters",
    "log.metric('x' * 10**6, 1)": "a name has 64 letters",
    "log.metric(3, 1)": "a name has 64 letters",
    "log.extra('é', [1, 2])": "a name has 64 letters",
    "log.extra('x', [1])": "[1] is no list with a value for each completion, 2",
    "log.extra('x', [1] * 10**6)": "is no list with a value for each completion, 2",
    "log.extra('x', 'ab')": "'ab' is no list",
    "log.extra('x', None)": "None is no list",
    "[log.metric(f'm{n}', n) for n in range(MAX_NAMES + 1)]": "32 names already",
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_cannot_be_logged_is_left_out_with_the_reason(call: str) -> None:
    log = Log(2)
    log.metric("kept", 1)
    eval(call, {"log": log, "math": math, "MAX_NAMES": MAX_NAMES - 1})
    columns = log.columns
    assert REFUSED[call] in log.refused and len(log.refused) < 200
    assert log.metrics["kept"] == (1.0, 1) and "x" not in log.metrics and columns == {}
    Reply(values=[1.0, 1.0], metrics=log.metrics, columns=columns, refused=log.refused)  # a process may send it


def test_it_costs_no_reward_and_a_warning_says_it(groups: Any, named: Any) -> None:
    source = """
        def f(completions, log_metric, log_extra, **columns):
            for n in range(9):
                log_metric("x", float("nan"))
            log_extra("y", [1])
            return [1.0] * len(completions)
    """
    warnings: list[tuple[str, str]] = []
    scored = score(groups(["a", "b"]), [named(source)], warn=lambda *pair: warnings.append(pair))
    assert [one.reward for one in scores_of(scored)] == [1.0, 1.0] and scored.logged == {}
    ((about, sentence),) = warnings
    assert about == "log of f" and "some of what it logs is left out: log_metric('x', …): nan" in sentence


def test_gspo_check_refuses_it(groups: Any, functions: Any) -> None:
    with pytest.raises(UserError, match=r"reward function f0: log_metric\('', …\): a name has"):
        score(groups(["a"]), functions(lambda log_metric, **columns: [log_metric("", 1), 1.0][1:]), strict=True)
