"""Functions from Python: calls run at the same time, each within its limit, and a stuck one harms no other."""

import asyncio
import signal
import threading
import time
from typing import Any

import pytest
from tests.samples import scores_of

from gspo.errors import Stopped, UserError
from gspo.interrupt import Interrupt
from gspo.reward.calls import RewardFunction, Threads
from gspo.reward.score import score


def rewards(scored: Any) -> list[float | None]:
    return [one.reward for one in scores_of(scored)]


def kinds(scored: Any) -> list[str | None]:
    return [score.failure.kind if score.failure else None for score in scores_of(scored)]


def by_length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def by_length_later(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.001)
    return by_length(completions)


def test_a_call_over_its_limit_masks_its_group(groups: Any, functions: Any) -> None:
    released = threading.Event()

    def stuck_once(completions: list[str], **columns: Any) -> list[float]:
        if completions[0] == "stuck":
            released.wait()
        return [1.0] * len(completions)

    try:
        scored = score(groups(["stuck", "a"], *[["b", "c"]] * 9), functions(stuck_once, time_limit_seconds=0.2))
    finally:
        released.set()
    assert rewards(scored) == [None, None] + [1.0] * 18
    assert kinds(scored) == ["timed_out", "timed_out"] + [None] * 18


def test_a_stuck_coroutine_is_cancelled_and_masks_its_group(groups: Any, functions: Any) -> None:
    cancelled = threading.Event()

    async def stuck_once(completions: list[str], **columns: Any) -> list[float]:
        try:
            await asyncio.sleep(1000 if completions[0] == "stuck" else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1.0] * len(completions)

    scored = score(groups(["stuck"], *[["b"]] * 9), functions(stuck_once, time_limit_seconds=0.2))
    assert (rewards(scored), kinds(scored)) == ([None] + [1.0] * 9, ["timed_out"] + [None] * 9)
    assert cancelled.wait(5)


def test_too_many_timeouts_end_the_run(groups: Any, functions: Any) -> None:
    released = threading.Event()

    def stuck(**columns: Any) -> list[float]:
        released.wait()
        return [1.0]

    try:
        with pytest.raises(UserError, match=r"ran over its time limit of 0\.1 s"):
            score(groups(*[["a"]] * 4), functions(stuck, time_limit_seconds=0.1))
        # More stuck threads than places, and the next step is scored all the same.
        with pytest.raises(UserError):
            score(groups(*[["a"]] * 40), functions(stuck, time_limit_seconds=0.1))
        assert rewards(score(groups(["abc"]), functions(by_length, time_limit_seconds=5))) == [3.0]
    finally:
        released.set()


def test_a_coroutine_that_blocks_its_loop_does_not_block_the_next_step(groups: Any, functions: Any) -> None:
    released = threading.Event()

    async def blocks(**columns: Any) -> list[float]:
        released.wait()
        return [1.0]

    try:
        with pytest.raises(UserError):
            score(groups(["a"]), functions(blocks, time_limit_seconds=0.1))
        assert rewards(score(groups(["abc"]), functions(by_length_later, time_limit_seconds=5))) == [3.0]
    finally:
        released.set()


def test_calls_run_at_the_same_time(groups: Any, functions: Any) -> None:
    # Each barrier opens only when all its calls wait at it: two groups, and two functions.
    between_groups, between_functions = threading.Barrier(2), threading.Barrier(4)

    def meets(**columns: Any) -> list[float]:
        between_groups.wait(timeout=10)
        between_functions.wait(timeout=10)
        return [1.0]

    def meets_too(**columns: Any) -> list[float]:
        between_functions.wait(timeout=10)
        return [1.0]

    assert rewards(score(groups(["a"], ["b"]), functions(meets, meets_too))) == [2.0, 2.0]


def test_coroutines_run_at_the_same_time_and_share_a_loop(groups: Any, functions: Any) -> None:
    waiting: list[asyncio.Event] = []
    loops = set()

    async def meets(**columns: Any) -> list[float]:
        loops.add(asyncio.get_running_loop())
        waiting.append(asyncio.Event())
        if len(waiting) == 3:
            for event in waiting:
                event.set()
        await asyncio.wait_for(waiting[-1].wait() if len(waiting) < 3 else waiting[0].wait(), timeout=10)
        return [1.0]

    assert rewards(score(groups(["a"], ["b"], ["c"]), functions(meets))) == [1.0, 1.0, 1.0]
    assert len(loops) == 1


def test_async_functions_work_where_a_loop_runs_already(groups: Any, functions: Any) -> None:
    async def notebook() -> Any:
        return score(groups(["ab"]), functions(by_length_later))

    assert rewards(asyncio.run(notebook())) == [2.0]


def test_calls_beyond_a_functions_own_places_wait_without_their_clock_running(groups: Any) -> None:
    at_once, most = [0], [0]

    def one_at_a_time(completions: Any, **columns: Any) -> list[float]:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        time.sleep(0.03)
        at_once[0] -= 1
        return [1.0] * len(completions)

    places = Threads(num_places=1)
    slow = RewardFunction(name="slow", call=one_at_a_time, time_limit_seconds=0.3, host=places)
    scored = score(groups(*[["x"]] * 20), [slow])  # 0.6 s in all: twice the limit of one call
    assert most == [1] and rewards(scored) == [1.0] * 20


def test_a_stop_while_calls_wait_begins_none_of_them(groups: Any) -> None:
    released, begun, interrupt = threading.Event(), list[str](), Interrupt(lambda _: None)

    def waits(completions: list[str], **columns: Any) -> list[float]:
        begun.append(completions[0])
        interrupt.signal = signal.SIGTERM
        released.wait()
        return [1.0]

    function = RewardFunction(name="waits", call=waits, host=Threads(num_places=1))
    try:
        with interrupt, pytest.raises(Stopped):
            score(groups(["a"], ["b"]), [function])
    finally:
        released.set()
    time.sleep(0.1)
    assert begun == ["a"]
