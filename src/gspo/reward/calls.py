"""Many calls at once, each with a time limit that a stuck one cannot make others pay for."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from gspo.reward.reply import Reply, reply_of, reply_of_coroutine

MAX_CONCURRENT_CALLS = 32
LOOP_ANSWER_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 1e6  # a lock takes no timeout of any length
LOOK_SECONDS = 0.2  # between two looks at whether the run is to stop


class Host(Protocol):
    """Where a function's calls are made: in processes of its own (Processes), or in the trainer's (Threads).

    `num_places` threads call `make` at once, with all calls that wait, or with one. `stop` ends or abandons what runs,
    so that they return, and `open` begins anew; `close` ends the processes too.
    """

    num_places: int
    takes_all: bool

    def open(self) -> None: ...
    def make(self, calls: Sequence["Call"]) -> Sequence[Reply]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call to be made, of a function for `size` completions.

    Example: Call(key=job, host=host, function=f, is_async=False, arguments={"completions": ["4"]}, size=1,
    time_limit_seconds=60.0)
    """

    key: Any  # what its maker knows it by
    host: Host
    function: Callable[..., Any]
    is_async: bool
    arguments: Mapping[str, Any]
    size: int
    time_limit_seconds: float

    def timed_out(self) -> Reply:
        """The reply in place of one that does not come in time."""
        return Reply(kind="timed_out", what=f"it ran over its time limit of {self.time_limit_seconds:g} s")


class Finished(NamedTuple):
    """A call, what came of it, and the seconds it took: of calls that were made together, an equal share."""

    call: Call
    reply: Reply
    seconds: float


def run_calls(waiting: deque[Call], check_stop: Callable[[], None] = lambda: None) -> Generator[Finished, None, None]:
    """Make the calls, which are taken out of the queue, in the order they finish; a call's clock starts when it does.

    More calls of the same hosts may be put in the queue while it goes on. However the loop over it ends, nothing is
    left running: close the generator where an exception may end that loop.
    """
    pools = {call.host: ThreadPoolExecutor(call.host.num_places, "reward") for call in waiting}
    finished: SimpleQueue[Future[list[Finished]]] = SimpleQueue()
    num_running = 0
    try:
        for host in pools:
            host.open()
        while waiting or num_running:
            batches: dict[Host | Call, list[Call]] = {}
            for call in waiting:
                batches.setdefault(call.host if call.host.takes_all else call, []).append(call)
            waiting.clear()
            for calls in batches.values():
                pools[calls[0].host].submit(_make, calls).add_done_callback(finished.put)
                num_running += 1
            while True:
                check_stop()
                with suppress(Empty):
                    yield from finished.get(timeout=LOOK_SECONDS).result()
                    break
            num_running -= 1
    finally:
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for host in pools:
            host.stop()


def _make(calls: Sequence[Call]) -> list[Finished]:
    started = time.monotonic()
    replies = calls[0].host.make(calls)
    seconds = (time.monotonic() - started) / len(calls)
    return [Finished(call, reply, seconds) for call, reply in zip(calls, replies, strict=True)]


class Threads:
    """A host for functions from Python, which may close over anything: they run in the trainer's own process.

    Each call has a daemon thread; coroutines share an event loop. A stuck thread cannot be ended; it is abandoned,
    and neither holds a place nor keeps the program from ending.
    """

    takes_all = False

    def __init__(self, *, concurrent_calls: int = MAX_CONCURRENT_CALLS) -> None:
        self.num_places = concurrent_calls
        self._running: set[Future[Reply]] = set()
        self._is_stopped = False

    def open(self) -> None:
        """Get ready to make calls."""
        self._is_stopped = False

    def make(self, calls: Sequence[Call]) -> Sequence[Reply]:
        """Make a call; one over its limit is cancelled where it is a coroutine, and else abandoned."""
        (call,) = calls
        make, future = partial(call.function, **call.arguments), Future[Reply]()
        if call.is_async:
            coroutine = reply_of_coroutine(make, call.function, call.size)
            future = asyncio.run_coroutine_threadsafe(coroutine, _responsive_loop())
        else:
            work = partial(_deliver, future, partial(reply_of, make, call.function, call.size))
            threading.Thread(target=work, name="reward call", daemon=True).start()
        self._running.add(future)
        try:
            limit = 0 if self._is_stopped else min(call.time_limit_seconds, LONGEST_WAIT_SECONDS)
            return [future.result(timeout=limit)]
        except (TimeoutError, CancelledError):
            return [call.timed_out()]
        finally:
            future.cancel()
            self._running.discard(future)

    def stop(self) -> None:
        """Cancel or abandon whatever runs."""
        self._is_stopped = True
        for future in list(self._running):
            future.cancel()

    close = stop


def _deliver(future: Future[Reply], work: Callable[[], Reply]) -> None:
    with suppress(InvalidStateError):  # it was abandoned before
        future.set_result(work())


_loops: list[asyncio.AbstractEventLoop] = []  # clients that a reward function keeps between steps belong to the last
_loops_lock = threading.Lock()


def _responsive_loop() -> asyncio.AbstractEventLoop:
    """The event loop for coroutines; a new one where a coroutine that blocks has made the old one deaf."""
    with _loops_lock:
        answered = threading.Event()
        for loop in _loops[-1:]:
            loop.call_soon_threadsafe(answered.set)
        if not _loops or not answered.wait(LOOP_ANSWER_SECONDS):
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[-1].run_forever, name="reward event loop", daemon=True).start()
        return _loops[-1]
