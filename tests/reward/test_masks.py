"""A function that fails on a completion masks that one: no zero, no part of a sum, no part in its group."""

import math
import re
from typing import Any

import pytest
from tests.samples import advantages_of, scores_of

from gspo.errors import UserError
from gspo.learner.advantages import with_advantages
from gspo.reward.calls import RewardFunction
from gspo.reward.score import score
from gspo.types import Batch, Failure

TWENTY = [["good"] * 4 + ["bad"], *[["good"] * 5] * 3]  # one of 20 is bad
GOOD_BUT_ONE = [1.0] * 4 + [None] + [1.0] * 15


def rewards(scored: Any) -> list[float | None]:
    return [one.reward for one in scores_of(scored)]


def only_failure(scored: Batch) -> Failure:
    (failure,) = [one.failure for one in scores_of(scored) if one.failure is not None]
    assert scores_of(scored)[4].failure is failure
    return failure


SOURCES = {
    "raised": (
        "def f(completions, **columns):\n    return [{'good': 1}[text] for text in completions]\n",
        r"reward function f: it raises KeyError: 'bad', at .*mine_0\.py:2",
    ),
    "raised in a coroutine": (
        "async def f(completions, **columns):\n    return [{'good': 1}[text] for text in completions]\n",
        r"reward function f: it raises KeyError: 'bad', at .*mine_0\.py:2",
    ),
    "left": (
        "import sys\ndef f(completions, **columns):\n"
        "    return [1.0 if text == 'good' else sys.exit(3) for text in completions]\n",
        r"reward function f: it raises SystemExit: 3",
    ),
    "crashed": (
        "import ctypes\ndef f(completions, **columns):\n"
        "    return [1.0 if text == 'good' else ctypes.string_at(0) for text in completions]\n",
        r"reward function f: its process was ended by signal 11 \(SIGSEGV\)",
    ),
    "crashed beside coroutines": (
        "import asyncio, ctypes\nasync def f(completions, **columns):\n"
        "    await asyncio.sleep(0.02 if 'bad' in completions else 0.06)\n"
        "    return [1.0 if text == 'good' else ctypes.string_at(0) for text in completions]\n",
        r"reward function f: its process was ended by signal 11 \(SIGSEGV\)",
    ),
    "crashed by leaving": (
        "import os\ndef f(completions, **columns):\n"
        "    return [1.0 if text == 'good' else os._exit(7) for text in completions]\n",
        r"reward function f: its process ended with exit status 7",
    ),
    "invalid": (
        "def f(completions, **columns):\n"
        "    return [1.0 if text == 'good' else float('nan') for text in completions]\n",
        r"reward function f: it returns nan for a completion",
    ),
    "invalid by its size": (
        "def f(completions, **columns):\n    return [1.0 for text in completions if text == 'good']\n",
        r"reward function f: it returns a list of 0 for 1 completion$",
    ),
}


@pytest.mark.parametrize("case", SOURCES)
def test_only_the_completion_a_function_fails_on_is_masked(case: str, groups: Any, named: Any) -> None:
    source, said = SOURCES[case]
    scored = score(groups(*TWENTY), [named(source)])
    assert rewards(scored) == GOOD_BUT_ONE
    failure = only_failure(scored)
    assert failure.kind == ("raised" if case == "left" else case.split()[0])
    assert re.match(said, failure.message), failure.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0", [1.0], 1j, object()])
def test_a_value_that_is_no_score_masks_its_own_place_without_a_second_call(
    value: Any, groups: Any, functions: Any
) -> None:
    sizes: list[int] = []

    def one_odd(completions: list[str], **columns: Any) -> list[Any]:
        sizes.append(len(completions))
        return [1.0 if text == "good" else value for text in completions]

    scored = score(groups(*TWENTY), functions(one_odd))
    assert rewards(scored) == GOOD_BUT_ONE and sizes == [5] * 4
    assert only_failure(scored).kind == "invalid"


def test_a_call_over_its_limit_masks_its_group_and_is_not_made_again(groups: Any, named: Any, tmp_path: Any) -> None:
    source = """
        import time
        def f(completions, **columns):
            print("called", file=open("calls.txt", "a"))
            time.sleep(1000 if "bad" in completions else 0)
            return [1.0] * len(completions)
    """
    scored = score(groups(["good", "bad"], *[["good"] * 2] * 9), [named(source, time_limit_seconds=0.5)])
    assert rewards(scored) == [None] * 2 + [1.0] * 18
    late = Failure(kind="timed_out", message="reward function f: it ran over its time limit of 0.5 s")
    assert [one.failure for one in scores_of(scored)] == [late] * 2 + [None] * 18
    assert len((tmp_path / "calls.txt").read_text().splitlines()) == 10


def test_none_is_no_failure(groups: Any, named: Any) -> None:
    scored = score(groups(["a"] * 4), [named("def f(completions, **columns):\n    return [None] * len(completions)\n")])
    assert rewards(scored) == [None] * 4 and [one.failure for one in scores_of(scored)] == [None] * 4


@pytest.mark.parametrize(("num_bad", "ends"), [(2, False), (3, True)])
def test_more_than_a_fifth_masked_ends_the_run(num_bad: int, ends: bool, groups: Any, functions: Any) -> None:
    def fails(completions: list[str], **columns: Any) -> list[float]:
        return [float(text) for text in completions]

    step = groups(*[["1", "bad"]] * num_bad, *[["1", "1"]] * (5 - num_bad))
    if not ends:
        assert rewards(score(step, functions(fails))).count(None) == num_bad
        return
    with pytest.raises(UserError, match=r"ValueError: .* 'bad', at .*; 3 of 10 responses have no reward") as caught:
        score(step, functions(fails))
    assert caught.value.where is not None and caught.value.where.startswith("reward function f0, row data:")


def test_the_run_ends_as_soon_as_too_much_is_masked_for_certain(groups: Any, named: Any, tmp_path: Any) -> None:
    source = """
        import time
        def f(completions, **columns):
            print("called", file=open("calls.txt", "a"))
            time.sleep(1000)
    """
    function = named(source, time_limit_seconds=0.2, concurrent_calls=2)
    with pytest.raises(
        UserError, match=r"ran over its time limit of 0\.2 s; 6 of 20 responses have no reward(.|\n)*time_limit_seconds"
    ):
        score(groups(*[["a", "b"]] * 10), [function])
    assert len((tmp_path / "calls.txt").read_text().splitlines()) <= 4  # the third to hang is enough


def test_rollouts_that_two_functions_mask_count_once(groups: Any, functions: Any) -> None:
    def fails(completions: list[str], **columns: Any) -> list[float]:
        return [float(text) for text in completions]

    step = groups(["bad", "1", "1", "1", "1"])
    scored = score(step, functions(fails, fails))
    assert rewards(scored) == [None, 2.0, 2.0, 2.0, 2.0]
    failure = scores_of(scored)[0].failure
    assert failure is not None and failure.message.startswith("reward function f0: ")


def test_a_failure_masks_the_rollout_whatever_the_others_say_but_not_where_its_weight_is_0(
    groups: Any, functions: Any
) -> None:
    def fails(completions: list[str], **columns: Any) -> list[float]:
        return [float(text) for text in completions]

    def fine(completions: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    step = groups(["1", "1", "1", "1", "bad"])
    both = functions(fails, fine)
    scored = score(step, both)
    assert rewards(scored) == [1.5] * 4 + [None]
    assert scores_of(scored)[4].parts == {"f0": None, "f1": 0.5}
    watched = RewardFunction(name="watched", call=fails, weight=0.0)
    scored = score(groups(["bad", "bad", "1"]), [watched, both[1]])  # not counted among the masked either
    assert rewards(scored) == [0.5] * 3 and [one.failure for one in scores_of(scored)] == [None] * 3
    assert [one.parts["watched"] for one in scores_of(scored)] == [None, None, 1.0]


def test_a_masked_rollout_has_no_advantage_and_the_group_is_compared_without_it(groups: Any, functions: Any) -> None:
    def fails(completions: list[str], **columns: Any) -> list[float]:
        return [float(text) for text in completions]

    with_bad = groups(["0", "1", "5", "bad", "2"])
    scored = score(with_bad, functions(fails))
    advantages = advantages_of(with_advantages(scored))
    without = groups(["0", "1", "5", "2"])
    rest = advantages_of(with_advantages(score(without, functions(fails))))
    assert advantages == [*rest[:3], 0.0, rest[3]]


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_strictly_every_failure_ends_the_run(weight: float, groups: Any) -> None:
    def counts_wrong(**columns: Any) -> list[float]:
        return [1.0]  # right for one completion by itself

    function = RewardFunction(name="f", call=counts_wrong, weight=weight)
    with pytest.raises(UserError, match=r"f, row data:10: it returns a list of 1 for 10 completions\n"):
        score(groups(*[["a"]] * 9, ["a"] * 10), [function], strict=True)


def test_a_wrong_number_of_scores_is_said_though_each_completion_by_itself_has_one(groups: Any) -> None:
    def counts_wrong(**columns: Any) -> list[float]:
        return [1.0]

    warnings: list[tuple[str, str]] = []
    function = RewardFunction(name="f", call=counts_wrong)
    scored = score(groups(["a"] * 4), [function], warn=lambda *pair: warnings.append(pair))
    assert rewards(scored) == [1.0] * 4
    ((_, said),) = warnings
    assert "f, row data:1: it returns a list of 1 for 4 completions; it is called again for each by itself" in said


@pytest.mark.parametrize("value", [1e300, -1e101, 10**101])
def test_a_number_that_no_sum_of_squares_could_hold_is_no_score(value: float, groups: Any, functions: Any) -> None:
    def huge(completions: Any) -> list[float]:
        return [1.0 if text == "good" else value for text in completions]

    scored = score(groups(*TWENTY), functions(huge))
    assert rewards(scored) == GOOD_BUT_ONE
    assert only_failure(scored).kind == "invalid"
