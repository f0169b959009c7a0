"""A call is ended, with all that it has started, when its time is over or when the step is."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.samples import scores_of

from gspo import loop
from gspo.reward.score import Scoring, score


def rewards(scored: Any) -> list[float | None]:
    return [one.reward for one in scores_of(scored)]


FAMILY = """
import os, subprocess, sys, time
DAEMON = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)"
def f(completions, **columns):
    if completions[0] != "stuck":
        return [1.0] * len(completions)
    own_session = subprocess.Popen(["sleep", "1000"], start_new_session=True, env=environment)
    command = [sys.executable, "-c", DAEMON]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE)
    with open("pids.txt", "w") as file:
        print(os.getpid(), own_session.pid, int(daemon.stdout.readline()), file=file)
    ending()
"""
ENDINGS = {
    "sleeps": "time.sleep(1000)",
    "holds the interpreter": "sum(iter(int, 1))",  # one C call without end
    "crashes": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_process_is_ended_with_all_that_it_has_started(
    how: str, groups: Any, named: Any, gone: Any, tmp_path: Path
) -> None:
    # With an empty environment a child is known by its parent alone, which a crash takes away.
    source = f"{FAMILY}environment = {None if how == 'crashes' else {}}\ndef ending():\n    {ENDINGS[how]}\n"
    function = named(source, time_limit_seconds=2.0, concurrent_calls=1)
    scored = score(groups(["stuck"], *[["a"]] * 9), [function])
    assert rewards(scored) == [None] + [1.0] * 9
    pids = [int(pid) for pid in (tmp_path / "pids.txt").read_text().split()]
    assert [gone(pid) for pid in pids] == [True] * 3
    assert not Path(f"/proc/{pids[0]}").exists()  # waited for: no zombie


def test_the_end_of_a_process_shows_though_a_fork_of_it_lives_on(groups: Any, named: Any) -> None:
    source = """
        import os, signal, time
        def f(completions, **columns):
            if completions[0] == "bad":
                if os.fork() == 0:
                    time.sleep(1000)
                os.kill(os.getpid(), signal.SIGKILL)
            return [1.0]
    """
    scored = score(groups(["bad"], *[["a"]] * 9), [named(source, time_limit_seconds=5.0)])
    failure = scores_of(scored)[0].failure
    assert failure is not None and failure.kind == "crashed" and rewards(scored)[1:] == [1.0] * 9


def test_coroutines_run_at_the_same_time_in_one_process(groups: Any, named: Any) -> None:
    source = """
        import asyncio, os
        waiting = []
        async def f(completions, **columns):
            waiting.append(asyncio.Event())
            if len(waiting) == 20:
                for event in waiting:
                    event.set()
            await waiting[-1].wait() if len(waiting) < 20 else None
            return [float(os.getpid())]
    """
    assert len(set(rewards(score(groups(*[["a"]] * 20), [named(source)])))) == 1


def test_no_more_coroutines_than_are_allowed_run_at_once(groups: Any, named: Any) -> None:
    source = """
        import asyncio
        running = 0
        async def f(completions, **columns):
            global running
            running += 1
            most = running
            await asyncio.sleep(0.01)
            running -= 1
            return [float(most)]
    """
    assert max(filter(None, rewards(score(groups(*[["a"]] * 12), [named(source, concurrent_calls=3)])))) == 3


def test_a_coroutine_over_its_limit_is_cancelled_and_its_process_goes_on(groups: Any, named: Any) -> None:
    source = """
        import asyncio, os
        cancelled = 0
        async def f(completions, **columns):
            global cancelled
            try:
                await asyncio.sleep(1000 if completions[0] == "stuck" else 0)
            except asyncio.CancelledError:
                cancelled += 1
                raise
            return [os.getpid() + cancelled / 2]
    """
    function = named(source, time_limit_seconds=0.3)
    scored = score(groups(["stuck"], *[["a"]] * 9), [function])
    first, failure = rewards(scored), scores_of(scored)[0].failure
    assert failure is not None and failure.kind == "timed_out"
    assert first[0] is None and len(set(first[1:])) == 1 and first[1] is not None
    assert rewards(score(groups(["a"]), [function])) == [first[1] + 0.5]


BLOCKS = """
import asyncio, os, time
async def f(completions, **columns):
    await asyncio.sleep(0.1)
    if completions[0] == "blocks":
        time.sleep(1000)
    while completions[0] == "deaf":
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
    return [1.0]
"""


@pytest.mark.parametrize("how", ["blocks", "deaf"])
def test_a_coroutine_that_cannot_be_cancelled_is_ended_and_those_beside_it_are_made_again(
    how: str, groups: Any, named: Any
) -> None:
    function = named(BLOCKS, time_limit_seconds=0.5)
    assert rewards(score(groups([how], *[["a"]] * 9), [function])) == [None] + [1.0] * 9
    assert rewards(score(groups(["a"]), [function])) == [1.0]


class Terminated(BaseException):
    pass


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_exception_from_a_signal_leaves_no_call_running_and_the_processes_usable(
    kind: str, groups: Any, named: Any, gone: Any, tmp_path: Path
) -> None:
    source = f"""
        import asyncio, os, time
        {kind} f(completions, **columns):
            if completions[0] == "stuck":
                with open("pids.txt", "a") as file:
                    print(os.getpid(), file=file)
                time.sleep(1000)
            return [1.0]
    """

    def terminate(number: int, frame: Any) -> None:
        if frame.f_code.co_filename.endswith("_weakrefset.py"):  # where Python drops exceptions: a moment later
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            raise Terminated

    function = named(source, concurrent_calls=2)
    score(groups(["a"]), [function])
    previous = signal.signal(signal.SIGALRM, terminate)
    try:
        for delay in (0.3, 0.01, 0.02, 0.003):  # at different places of the work
            with pytest.raises(Terminated):
                signal.setitimer(signal.ITIMER_REAL, delay)
                score(groups(*[["stuck"]] * 40), [function])
            started = {int(pid) for pid in (tmp_path / "pids.txt").read_text().split()}
            assert started and all(gone(pid) for pid in started)
            assert rewards(score(groups(["a"], ["b"]), [function])) == [1.0, 1.0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_the_time_limit_may_be_of_any_size(groups: Any, named: Any, functions: Any) -> None:
    function = named("def f(completions):\n    return [1.0]\n", time_limit_seconds=1e300)
    start = time.monotonic()
    assert rewards(score(groups(["a"]), [function, *functions(lambda **_: [1.0], time_limit_seconds=1e300)])) == [2.0]
    assert time.monotonic() - start < 60


def test_large_calls_of_an_async_function_do_not_mix(groups: Any, named: Any) -> None:
    source = "async def f(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    texts = [[letter * 600_000] for letter in "abcdefgh"]
    start = time.monotonic()
    assert rewards(score(groups(*texts), [named(source, time_limit_seconds=30)])) == [600_000.0] * 8
    assert time.monotonic() - start < 20


def test_a_call_that_is_given_up_leaves_those_in_its_process_alone(groups: Any, named: Any, tmp_path: Path) -> None:
    source = """
        import asyncio, os
        async def f(completions, **columns):
            with open("calls.txt", "a") as file:
                print(completions[0], os.getpid(), file=file)
            await asyncio.sleep(1000 if completions[0] == "long" else 0.5)
            return [1.0]
    """
    function = named(source)

    async def both() -> list[Any]:
        scoring = Scoring([function], num_samples=2)
        long, short = (asyncio.create_task(scoring.score(group)) for group in groups(["long"], ["short"]))
        while len((tmp_path / "calls.txt").read_text().splitlines() if (tmp_path / "calls.txt").exists() else "") < 2:
            await asyncio.sleep(0.01)
        long.cancel()
        return rewards(await short)

    assert loop.run(both()) == [1.0]
    calls = (tmp_path / "calls.txt").read_text().split()
    assert sorted(calls[::2]) == ["long", "short"] and len({*calls[1::2]}) == 1
