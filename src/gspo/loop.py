"""What goes on beside the trainer: threads, and the event loop, where servers and reward functions are waited for.

Whoever waits for the event loop may compute for it meanwhile: see `have_waiter_do`.
"""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from gspo.interrupt import check_stop

P = ParamSpec("P")
T = TypeVar("T")
LOOK_SECONDS = 0.05  # between two looks of whoever waits

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork has no threads
_lock = threading.Lock()
# Calls for the thread that waits in `run`, for the coroutines that it waits for; None: it is to look again.
_calls: ContextVar[SimpleQueue[Callable[[Callable[[], object]], object] | None]] = ContextVar("calls")


def in_thread(name: str, call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> Future[T]:
    """Make a call in a thread of its own, which does not keep the process from ending; its result or its error.

    Cancelling the future, or leaving it, gives the call up; it runs to its end all the same. An error is shown, too:
    who waits for nothing of a thread would never hear of it.
    """
    future = Future[T]()

    def work() -> None:
        try:
            result = call(*arguments, **keywords)
        except BaseException as error:
            with suppress(InvalidStateError):
                future.set_exception(error)
            raise
        else:
            with suppress(InvalidStateError):
                future.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine; cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def have_waiter_do(call: Callable[[Callable[[], object]], object]) -> None:
    """Have the thread that waits in `run` for this coroutine make a call.

    The call's argument is to be called often meanwhile, and raises what ends the waiting. A computing thread of its own
    would have OpenMP threads of its own, too. GNU's OpenMP lets them sleep where there are more of them than cores, and
    small models would be decoded at half the speed.
    """
    _calls.get().put(call)


def run(work: Coroutine[Any, Any, T], look: Callable[[], object] = lambda: None) -> T:
    """The result of a coroutine; a signal ends it by Stopped.

    Meanwhile `look` is called again and again, and what it raises ends the coroutine, too.
    """
    calls: SimpleQueue[Callable[[Callable[[], object]], object] | None] = SimpleQueue()
    looked = -math.inf

    def look_about(*, now: bool = False) -> None:
        nonlocal looked
        check_stop()
        if now or monotonic() > looked + LOOK_SECONDS:
            look()
            looked = monotonic()

    tasks: list[asyncio.Task[Any]] = []

    async def noted() -> T:
        _calls.set(calls)  # for all tasks that it starts
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]  # within a task it is not None
        return await work

    async def end() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        future = start(noted())
        future.add_done_callback(lambda _: calls.put(None))
        while not future.done():
            look_about()
            with suppress(Empty):
                if (call := calls.get(timeout=LOOK_SECONDS)) is not None:
                    call(look_about)
        look_about(now=True)
        return future.result()
    except BaseException:  # of a signal it may have come anywhere in here
        start(end()).result()
        raise


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines that run at the same time; the first error ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # else it may be ending what it has begun, which a second time would cut short
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = loop = asyncio.new_event_loop()
            in_thread("gspo event loop", _serve, loop)
        return _loops[os.getpid()]


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop without end: a coroutine that is ended by a stop or an interrupt, which asyncio raises here, too."""
    while True:
        with suppress(KeyboardInterrupt, SystemExit):  # who waits for that coroutine gets it
            loop.run_forever()
