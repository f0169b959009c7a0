"""The event loop of the process: results, errors, and ends."""

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from gspo import loop
from gspo.errors import Stopped
from gspo.interrupt import Interrupt


async def raising(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("error", [ValueError("a"), TimeoutError("b"), Stopped(15), SystemExit(3), KeyboardInterrupt()])
def test_an_error_of_any_kind_reaches_who_waits_and_the_loop_goes_on(error: BaseException) -> None:
    with pytest.raises(type(error)):
        loop.run(loop.all_of([raising(error), asyncio.sleep(100)]))
    assert loop.run(asyncio.sleep(0, "still there")) == "still there"


class Waiting:
    """A coroutine that waits until it is ended, and what is looked at meanwhile: `act` once it has begun."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._begun, self.ended, self._act = threading.Event(), threading.Event(), act

    async def wait(self) -> None:
        self._begun.set()
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.05)
            self.ended.set()

    def look(self) -> None:
        if self._begun.is_set():
            self._act()


def test_what_a_look_raises_ends_the_coroutine_before_it_is_raised() -> None:
    def stop() -> None:
        raise Stopped(15)

    waiting = Waiting(stop)
    with pytest.raises(Stopped):
        loop.run(waiting.wait(), waiting.look)
    assert waiting.ended.is_set()


def test_a_signal_ends_the_coroutine_before_stopped_is_raised() -> None:
    waiting = Waiting(lambda: signal.raise_signal(signal.SIGTERM))
    with Interrupt(lambda text: None), pytest.raises(Stopped) as stopped:
        loop.run(waiting.wait(), waiting.look)
    assert waiting.ended.is_set() and stopped.value.args == (signal.SIGTERM,)
    assert loop.run(asyncio.sleep(0, "outside")) == "outside"


def test_a_signal_that_has_come_before_is_heard_though_the_result_is_there_at_once() -> None:
    with Interrupt(lambda text: None):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            loop.run(asyncio.sleep(0))
        # What ends things may still wait for its own.
        assert loop.start(asyncio.sleep(0, "closed")).result() == "closed"


def test_the_first_error_ends_the_others() -> None:
    ended: list[Any] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    with pytest.raises(ValueError, match="first"):
        loop.run(loop.all_of([waits(), raising(ValueError("first")), waits()]))
    assert ended == [True, True]


def test_it_can_be_waited_for_where_another_loop_runs() -> None:
    async def notebook() -> int:
        return loop.run(asyncio.sleep(0, 3))

    assert asyncio.run(notebook()) == 3


def test_what_is_cancelled_has_time_to_end() -> None:
    """One that ends at once must not have the others, which end what they have begun, cancelled a second time."""
    ended = []

    async def begun() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    async def cancelled() -> None:
        task = asyncio.ensure_future(loop.all_of([asyncio.sleep(60), begun(), begun()]))
        await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert ended == [True, True]

    asyncio.run(cancelled())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is shown, too
def test_a_thread_gives_its_result_or_its_error_and_a_cancelled_one_gives_nothing() -> None:
    assert loop.in_thread("adds", sum, [1, 2]).result(60) == 3
    with pytest.raises(ZeroDivisionError):
        loop.in_thread("divides", lambda: 1 / 0).result(60)
    for thread in (thread for thread in threading.enumerate() if thread.name == "divides"):
        thread.join()  # what it shows is this test's
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(60)
        ended.set()

    future = loop.in_thread("waits", work)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "waits")
    assert thread.daemon and future.cancel()  # it would not keep the process from ending
    go_on.set()
    assert ended.wait(60)
