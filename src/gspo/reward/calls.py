"""Many calls at once, each with a time limit that a stuck one cannot make others pay for."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

MAX_CONCURRENT_CALLS = 32
LOOP_ANSWER_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call to be made: a function of no arguments; where `is_async`, it gives a coroutine."""

    function: Callable[[], Any]
    is_async: bool
    time_limit_seconds: float
    lane: str = ""  # calls of one lane share `at_once` places
    at_once: int = MAX_CONCURRENT_CALLS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call went: its value, or its error, or neither where it ran over its time limit."""

    seconds: float
    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True)
class _Running:
    deadline: float
    cancel: Callable[[], Any]


Finished = SimpleQueue[tuple[int, Outcome]]


def run_calls(calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
    """The calls' indices and outcomes in the order they finish; a call's clock starts when the call does.

    Functions run in daemon threads of their own: a stuck one neither holds a place that another needs nor keeps the
    program from ending. Coroutines share one event loop in a thread, as their clients and locks expect.
    """
    finished: Finished = SimpleQueue()
    waiting = deque(enumerate(calls))
    running: dict[int, _Running] = {}
    loop = _responsive_loop() if any(call.is_async for call in calls) else None
    while waiting or running:
        while (ready := _take_ready(waiting, [calls[index].lane for index in running])) is not None:
            index, call = ready
            if loop and call.is_async:
                cancel = _start_coroutine(index, call, finished, loop)
            else:
                cancel = _start_thread(index, call, finished)
            running[index] = _Running(deadline=time.monotonic() + call.time_limit_seconds, cancel=cancel)
        yield from _settle(running, calls, finished)


def _take_ready(waiting: deque[tuple[int, Call]], lanes: Sequence[str]) -> tuple[int, Call] | None:
    """The first waiting call whose lane has a place left, taken out of the queue."""
    for position, (index, call) in enumerate(waiting):
        if lanes.count(call.lane) < call.at_once:
            del waiting[position]
            return index, call
    return None


def _settle(running: dict[int, _Running], calls: Sequence[Call], finished: Finished) -> Iterator[tuple[int, Outcome]]:
    """Wait for the next call to finish or to pass its deadline, and take it out of the running ones."""
    nearest = min(entry.deadline for entry in running.values())
    try:
        index, outcome = finished.get(timeout=max(0.0, nearest - time.monotonic()))
    except Empty:
        for index in [index for index, entry in running.items() if entry.deadline <= time.monotonic()]:
            running.pop(index).cancel()
            yield index, Outcome(seconds=calls[index].time_limit_seconds, timed_out=True)
        return
    if running.pop(index, None):  # else it was given up before
        yield index, outcome


def _start_thread(index: int, call: Call, finished: Finished) -> Callable[[], Any]:
    def work() -> None:
        start = time.monotonic()
        try:
            outcome = Outcome(value=call.function(), seconds=time.monotonic() - start)
        except BaseException as error:  # SystemExit too: the caller must hear of it
            outcome = Outcome(error=error, seconds=time.monotonic() - start)
        finished.put((index, outcome))

    threading.Thread(target=work, name=f"reward call {index}", daemon=True).start()
    return lambda: None  # a thread cannot be ended from outside


def _start_coroutine(index: int, call: Call, finished: Finished, loop: asyncio.AbstractEventLoop) -> Callable[[], Any]:
    async def work() -> None:
        start = time.monotonic()
        try:
            outcome = Outcome(value=await call.function(), seconds=time.monotonic() - start)
        except BaseException as error:
            outcome = Outcome(error=error, seconds=time.monotonic() - start)
        finished.put((index, outcome))

    return asyncio.run_coroutine_threadsafe(work(), loop).cancel


_loop: asyncio.AbstractEventLoop | None = None


def _responsive_loop() -> asyncio.AbstractEventLoop:
    """The event loop for coroutines; a new one where a coroutine that blocks has made the old one deaf."""
    global _loop  # noqa: PLW0603 - clients that a reward function keeps between steps belong to one loop
    if _loop is None or not _answers(_loop):
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, name="reward event loop", daemon=True).start()
    return _loop


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(LOOP_ANSWER_SECONDS)
