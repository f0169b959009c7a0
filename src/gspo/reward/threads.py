"""Calls in the trainer's own process: for functions from Python, which may close over anything."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gspo.reward.calls import Call, Events
from gspo.reward.reply import Reply, reply_of, reply_of_coroutine

MAX_CONCURRENT_CALLS = 32
LOOP_ANSWER_SECONDS = 1.0


class Threads:
    """A host whose functions run in daemon threads of their own, and coroutines on one event loop in a thread.

    A stuck thread cannot be ended; it is abandoned, and neither holds a place nor keeps the program from ending.
    """

    def __init__(self, *, concurrent_calls: int = MAX_CONCURRENT_CALLS) -> None:
        self._concurrent_calls = concurrent_calls
        self._cancels: dict[int, Callable[[], Any]] = {}  # of the running calls
        self._events: Events | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, events: Events) -> None:
        """Abandon what an interrupted step has left running; from now on events go to this queue."""
        self.end()
        self._events, self._loop = events, None

    def start(self, number: int, call: Call) -> bool:
        """Start a call; False where so many run that it must wait."""
        assert self._events is not None
        if len(self._cancels) >= self._concurrent_calls:
            return False
        report = partial(self._report, self._events, number)
        if call.is_async:
            self._loop = self._loop or _responsive_loop()
            self._cancels[number] = _start_coroutine(call, report, self._loop)
        else:
            self._cancels[number] = _start_thread(call, report)
        return True

    def grow(self, num_waiting: int) -> None:
        """Nothing: a place is there as soon as a call is over."""

    def settle(self, event: tuple[int, Reply]) -> Sequence[tuple[int, Reply | None]]:
        """The call that has finished, unless it was given up before."""
        number, reply = event
        return [(number, reply)] if self._cancels.pop(number, None) else []

    def cancel(self, number: int) -> float:
        """Cancel a coroutine, abandon a thread: over at once."""
        self._cancels.pop(number)()
        return 0.0

    def kill(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        """This call alone: none outlives its cancelling."""
        return [number], []

    def end(self) -> None:
        """Cancel or abandon whatever runs."""
        for number in list(self._cancels):
            self.cancel(number)

    def close(self) -> None:
        """The same: there is no process to end."""
        self.end()

    def _report(self, events: Events, number: int, reply: Reply) -> None:
        events.put((self, (number, reply)))


def _start_thread(call: Call, report: Callable[[Reply], Any]) -> Callable[[], Any]:
    def work() -> None:
        report(reply_of(partial(call.function, **call.arguments), call.function, call.size))

    threading.Thread(target=work, name="reward call", daemon=True).start()
    return lambda: None  # a thread cannot be ended from outside


def _start_coroutine(call: Call, report: Callable[[Reply], Any], loop: asyncio.AbstractEventLoop) -> Callable[[], Any]:
    async def work() -> None:
        report(await reply_of_coroutine(partial(call.function, **call.arguments), call.function, call.size))

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
