"""Scores: the columns a function gets, None and weights, faults with their place."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.samples import scores_of

from gspo import loop
from gspo.errors import UserError
from gspo.loop import all_of
from gspo.recipe.sections import RewardConfig
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import close_functions, load_functions
from gspo.reward.score import Scoring, score
from gspo.types import Batch


def rewards(scored: Any) -> list[float | None]:
    return [one.reward for one in scores_of(scored)]


def by_length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def by_length_later(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.001)
    return by_length(completions)


@pytest.mark.parametrize("function", [by_length, by_length_later])
def test_scores_come_group_after_group(function: Any, groups: Any, functions: Any) -> None:
    texts = [["a" * size for size in range(start, start + 3)] for start in range(50)]
    scored = score(groups(*texts), functions(function))
    assert rewards(scored) == [float(len(text)) for group in texts for text in group]
    assert all(one.failure is None for one in scores_of(scored)) and scored.reward_seconds["f0"] > 0


def test_the_progress_shown_rises_to_all_calls_though_a_call_that_failed_is_made_again(
    groups: Any, functions: Any
) -> None:
    def fails_on_one(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 / (text != "bad") for text in completions]

    shown: list[tuple[int, int, str]] = []
    five = groups(["a", "b", "bad"], *[["c"] * 6] * 4)
    score(five, functions(fails_on_one), show_progress=lambda *count: shown.append(count))
    dones = [done for done, *_ in shown]
    assert dones == sorted(dones) and set(shown) <= {(done, 5, "calls of reward functions") for done in range(6)}
    assert dones[-1] == 5


def test_a_group_has_its_scores_while_another_waits_for_them(groups: Any, functions: Any) -> None:
    """Whole: after the call of its second function, and after those that are made for one that failed."""
    others_are_there = threading.Event()
    waiting, second, third = groups(["a", "a"], ["b", "b"], ["c"])

    def waits_or_fails(completions: list[str], **columns: Any) -> list[float]:
        assert len(completions) == 1 or "b" not in completions[0]
        return [float("a" not in text or others_are_there.wait(10)) for text in completions]

    async def both() -> list[Batch]:
        scoring = Scoring(functions(waits_or_fails, by_length), num_samples=5)
        first = asyncio.create_task(scoring.score(waiting))
        others = await all_of([scoring.score(second), scoring.score(third)])
        assert not first.done()
        others_are_there.set()
        return [await first, *others]

    assert [rewards(batch) for batch in loop.run(both())] == [[2.0, 2.0], [2.0, 2.0], [2.0]]


def test_the_end_of_one_scoring_leaves_the_calls_of_another_alone(groups: Any, functions: Any) -> None:
    """Both call the same function; the first is stopped while the second waits for its answer."""
    begun, go = threading.Barrier(3), threading.Event()
    (function,) = functions(lambda completions, **columns: [float(begun.wait(10) >= 0 and go.wait(10))])

    def stop() -> None:
        if begun.n_waiting == 2 and not begun.broken:
            begun.wait(10)
            raise KeyboardInterrupt

    scored: list[Any] = []
    other = threading.Thread(target=lambda: scored.append(score(groups(["b"]), [function])))
    other.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(Scoring([function], num_samples=1).score(groups(["a"])[0]), stop)
    go.set()
    other.join()
    assert rewards(scored[0]) == [1.0]


def test_a_function_gets_the_columns_it_names_and_no_others(groups: Any, functions: Any) -> None:
    seen: dict[str, Any] = {}

    def named(completions: Any, answer: Any, level: int = 5, other: str = "default") -> list[float]:
        seen.update(completions=completions, answer=answer, level=level, other=other)
        return [1.0] * len(completions)

    def everything(**columns: Any) -> list[float]:
        seen["all"] = columns
        return [1.0] * 2

    score(groups(["x", "y"], answer=["2"], level=[3]), functions(named, everything))
    assert seen["answer"] == ["2", "2"] and seen["level"] == [3, 3] and seen["other"] == "default"
    of_run = {"trainer_state", "log_metric", "log_extra"}
    assert {name: value for name, value in seen["all"].items() if name not in of_run} == {
        "prompts": ["1+1=", "1+1="],
        "prompt_texts": ["", ""],
        "completions": ["x", "y"],
        "completion_ids": [[7, 8], [7, 8]],
        "answer": ["2", "2"],
        "level": [3, 3],
    }


def test_completions_are_messages_where_the_prompt_is(groups: Any, functions: Any) -> None:
    def content(prompts: Any, completions: Any) -> list[float]:
        assert prompts[0][0]["content"] == "1+1="
        return [float(completion[0]["content"]) for completion in completions]

    chat = groups(["1", "2"], prompt=[{"role": "user", "content": "1+1="}])
    assert rewards(score(chat, functions(content))) == [1.0, 2.0]


def test_options_arrive_as_they_are(groups: Any, functions: Any) -> None:
    def scaled(completions: Any, factor: float) -> list[float]:
        return [factor * len(text) for text in completions]

    assert rewards(score(groups(["ab", "c"]), functions(scaled, options={"factor": 3.0}))) == [6.0, 3.0]


@pytest.mark.parametrize("column", ["prompts", "completions", "completion_ids", "segments"])
def test_a_column_in_the_place_of_what_the_run_gives_is_refused(column: str, groups: Any, functions: Any) -> None:
    def takes(completions: Any, **columns: Any) -> list[float]:
        return [0.0 for _ in completions]

    per_segment = functions(takes, per="segment", segment_separator=";")
    with pytest.raises(UserError, match=f"row data:1: a column is named {column}"):
        score(groups(["x"], **{column: ["theirs"]}), per_segment)


@pytest.mark.parametrize(
    ("name", "options", "column"),
    [
        ("format", {"pattern": "x"}, "full_match"),
        ("format", {"pattern": "x"}, "pattern"),
        ("exact_match", {}, "answer_column"),
    ],
)
def test_a_column_sets_no_option_of_a_built_in(name: str, options: Any, column: str, groups: Any) -> None:
    loaded = load_functions([RewardConfig(function=name, options=options)])
    columns = {"answer": ["an x"], column: [True]}
    try:
        assert rewards(score(groups(["an x"], **columns), loaded)) == [1.0]
    finally:
        close_functions(loaded)


def test_a_parameter_that_is_no_column_names_those_there(groups: Any, functions: Any) -> None:
    def needs(completions: Any, gold: Any) -> list[float]:
        return [0.0]

    with pytest.raises(UserError, match=r"f0, row data:1: it needs gold; the columns there are: answer, level"):
        score(groups(["x"], answer=["2"], level=[1]), functions(needs))


def test_the_reward_is_the_weighted_sum_of_the_parts_that_apply(groups: Any) -> None:
    def first(**columns: Any) -> list[float | None]:
        return [1.0, None, 1.0, None]

    def second(**columns: Any) -> list[float | None]:
        return [1.0, 1.0, None, None]

    both = [RewardFunction(name="a", call=first, weight=2.0), RewardFunction(name="b", call=second, weight=-0.5)]
    scored = score(groups(["w", "x", "y", "z"]), both)
    assert rewards(scored) == [1.5, -0.5, 2.0, None]
    assert [dict(one.parts) for one in scores_of(scored)][1] == {"a": None, "b": 1.0}


@pytest.mark.parametrize(
    "values",
    [
        [True, 0],
        (1, 0.0),
        np.array([1.0, 0.0]),
        torch.tensor([1.0, 0.0]),
        [np.float32(1), np.bool_(False)],
        [torch.tensor(1), 0],
    ],
)
def test_numbers_of_every_kind_are_taken(values: Any, groups: Any, functions: Any) -> None:
    scores = rewards(score(groups(["x", "y"]), functions(lambda **columns: values)))
    assert scores == [1.0, 0.0]
    assert all(type(reward) is float for reward in scores)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0], "returns a list of 1 for 2 completions"),
        ([1.0, 1.0, 1.0], "returns a list of 3 for 2 completions"),
        (1.0, r"returns 1\.0 for 2 completions"),
        (None, "returns None for 2 completions"),
        ("ab", "returns 'ab' for 2 completions"),
        ({1.0: 2, 2.0: 3}, "for 2 completions"),
        ([1.0, float("nan")], "returns nan"),
        ([float("-inf"), 1.0], "returns -inf"),
        (["1.0", 1.0], r"returns '1\.0'"),
        ([[1.0], [1.0]], r"returns \[1\.0\]"),
        (np.array([1.0, np.nan]), "returns nan"),
    ],
)
def test_every_bad_return_names_the_function_and_the_row(values: Any, said: str, groups: Any, functions: Any) -> None:
    with pytest.raises(UserError, match=said) as caught:
        score(groups(["x", "y"]), functions(lambda **columns: values), strict=True)
    assert caught.value.where == "reward function f0, row data:1"


def breaks(completions: Any, **columns: Any) -> list[float]:
    return [float(text) for text in completions]


async def breaks_later(completions: Any, **columns: Any) -> list[float]:
    return breaks(completions)


def leaves(**columns: Any) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (breaks, r"raises ValueError: could not convert string to float: 'x', at .*test_score\.py:\d+"),
        (breaks_later, r"raises ValueError: could not convert string to float: 'x', at .*test_score\.py:\d+"),
        (leaves, "raises SystemExit: 3"),
    ],
)
def test_a_function_that_raises_is_named_with_row_and_line(
    function: Any, said: str, groups: Any, functions: Any
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        score(groups(["1"], ["x"]), functions(function))
    assert caught.value.where is not None and caught.value.where.startswith("reward function f0, row data:")


def test_a_function_of_weight_0_is_measured_and_makes_nothing_applicable(groups: Any) -> None:
    def verifier(**columns: Any) -> list[float | None]:
        return [1.0, None]

    def watched(**columns: Any) -> list[float | None]:
        return [0.5, 0.5]

    both = [RewardFunction(name="a", call=verifier), RewardFunction(name="b", call=watched, weight=0.0)]
    scored = score(groups(["x", "y"]), both)
    assert rewards(scored) == [1.0, None]
    assert [one.parts["b"] for one in scores_of(scored)] == [0.5, 0.5]


def test_a_function_that_sets_alarms_is_told_why_they_fail(groups: Any, functions: Any) -> None:
    from math_verify import parse

    def with_alarm(completions: Any, **columns: Any) -> list[float]:
        return [float(bool(parse(text))) for text in completions]

    with pytest.raises(UserError, match="parsing_timeout=None"):
        score(groups(["$1$"]), functions(with_alarm))


def test_a_function_that_takes_a_text_for_messages_is_told_so(groups: Any, functions: Any) -> None:
    def for_messages(completions: list[Any], **columns: Any) -> list[float]:
        return [float(completion[0]["content"] == "x") for completion in completions]

    with pytest.raises(UserError, match="a completion is text where the prompt is text"):
        score(groups(["x", "y"]), functions(for_messages), strict=True)
