"""Reward functions and their calls: many at once, each with a time limit, so that a stuck one costs no other."""

import asyncio
import inspect
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from gspo.errors import UserError
from gspo.recipe.sections import Per, RewardConfig
from gspo.reward.log import TrainerState
from gspo.reward.reply import Arguments, Reply, reply_of, reply_of_coroutine, timed_out
from gspo.types import Sample

MAX_CONCURRENT_CALLS = 32
LOOP_ANSWER_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 1e6  # a lock takes no timeout of any length
LOOK_SECONDS = 0.2  # between two looks at whether the run is to stop

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # what arguments by name can be for

Function = Callable[..., Any]


def parameters_of(function: Function) -> Sequence[inspect.Parameter]:
    """What a function takes; UserError where it does not tell, as many that are written in C do not."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        what = f"{getattr(function, '__name__', function)} does not tell what arguments it takes"
        raise UserError(what, where="reward", fix="wrap it: def reward(completions, **columns): …") from None


class Host(Protocol):
    """Where a function's calls are made: in processes of its own (Processes), or in the trainer's (Threads).

    As many threads call `make` at once as `places` lets in, with all calls that wait, or with one. What they make they
    make for a round of calls: once its `stopped` is set nothing of it begins, and `stop` ends or abandons what runs of
    it. `close` ends everything, the processes too.
    """

    num_places: int
    places: threading.Semaphore
    takes_all: bool

    def make(self, calls: Sequence["Call"], stopped: threading.Event) -> Sequence[Reply]: ...
    def stop(self, stopped: threading.Event) -> None: ...
    def close(self) -> None: ...


class Threads:
    """A host for functions from Python, which may close over anything: they run in the trainer's own process.

    Each call has a daemon thread; coroutines share an event loop. A stuck thread cannot be ended; it is abandoned,
    and neither holds a place nor keeps the program from ending.
    """

    num_places = MAX_CONCURRENT_CALLS
    takes_all = False

    def __init__(self) -> None:
        self.places = threading.Semaphore(self.num_places)
        self._running: dict[Future[Reply], threading.Event] = {}  # with the round's event

    def make(self, calls: Sequence["Call"], stopped: threading.Event) -> Sequence[Reply]:
        """Make a call; one over its limit is cancelled where it is a coroutine, and else abandoned."""
        (call,) = calls
        if stopped.is_set():
            return [Reply()]
        function, size, future = call.function, len(call.samples), Future[Reply]()
        if is_async(function.call):
            coroutine = reply_of_coroutine(function.call, lambda: call.arguments, size)
            future = asyncio.run_coroutine_threadsafe(coroutine, _responsive_loop())
        else:
            work = partial(_deliver, future, partial(reply_of, function.call, lambda: call.arguments, size))
            threading.Thread(target=work, name="reward call", daemon=True).start()
        self._running[future] = stopped
        try:
            limit = 0 if stopped.is_set() else min(function.time_limit_seconds, LONGEST_WAIT_SECONDS)
            return [future.result(timeout=limit)]
        except (TimeoutError, CancelledError):
            return [timed_out(function.time_limit_seconds)]
        finally:
            future.cancel()
            self._running.pop(future, None)

    def stop(self, stopped: threading.Event) -> None:
        """Cancel or abandon what runs of a round."""
        for future in [future for future, event in [*self._running.items()] if event is stopped]:
            future.cancel()

    def close(self) -> None:
        """Cancel or abandon whatever runs."""
        for future in [*self._running]:
            future.cancel()


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


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A function in TRL's signature with what the recipe says about it.

    Example: RewardFunction(name="format", call=format_match, weight=0.1, options={"pattern": "<answer>"})
    """

    name: str  # unique in the recipe: the key in Score.parts
    call: Function
    weight: float = 1.0
    time_limit_seconds: float = RewardConfig.model_fields["time_limit_seconds"].default
    options: Mapping[str, Any] = field(default_factory=dict)
    only_options: Sequence[str] = ()  # parameters that no column of the data sets
    host: Host = field(default_factory=Threads)  # where calls are made
    per: Per = "response"  # what it gives a number for
    segment_separator: str | None = None  # that the rollouts' segments end with, where it is called per segment
    settings: str = ""  # that Python gave with it, other than by default: no recipe has them for a resume to compare


def is_async(function: Function) -> bool:
    """Whether a function, or an object that is called, gives a coroutine."""
    method = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call of a function for some samples of one group.

    Example: Call(function=function, samples=group.samples, arguments={"completions": ["4", "5"]})
    """

    function: RewardFunction
    samples: Sequence[Sample]
    arguments: Arguments
    state: TrainerState | None = None  # in them, and in those of a call that is made instead


def run_calls(
    calls: Sequence[Call],
    handle: Callable[[Call, Reply, float], Sequence[Call]],
    check_stop: Callable[[], None],
    more: Callable[[], Sequence[Call]] = tuple,
) -> None:
    """Make the calls, and hand over each with its reply and the seconds it took, in the order in which they finish.

    `handle` returns the calls to be made instead; what `more` returns, called again and again while any is under way,
    is made as well. A call's clock starts when it does; of calls that are made together, each has taken an equal share.
    However this ends, nothing of it is left running. Several threads may do this at the same time.
    """
    waiting: dict[Host, deque[Call]] = defaultdict(deque)
    pools: dict[Host, ThreadPoolExecutor] = {}
    finished: SimpleQueue[Future[list[tuple[Call, Reply, float]]]] = SimpleQueue()
    num_running, stopped = Counter[Host](), threading.Event()

    def add(new: Sequence[Call]) -> None:
        for call in new:
            waiting[call.function.host].append(call)

    add(calls)
    try:
        while any(waiting.values()) or num_running.total():
            add(more())
            for host, queue in waiting.items():
                pool = pools[host] = pools.get(host) or ThreadPoolExecutor(host.num_places, "reward")
                # No more than there is room for: what comes meanwhile is made together, and other rounds get a place.
                while queue and num_running[host] < host.num_places:
                    batch = [queue.popleft() for _ in range(len(queue) if host.takes_all else 1)]
                    pool.submit(_make, batch, stopped).add_done_callback(finished.put)
                    num_running[host] += 1
            check_stop()
            with suppress(Empty):
                made = finished.get(timeout=LOOK_SECONDS).result()
                num_running[made[0][0].function.host] -= 1
                for call, reply, seconds in made:
                    add(handle(call, reply, seconds))
    finally:
        stopped.set()
        for host, pool in pools.items():
            pool.shutdown(wait=False, cancel_futures=True)
            host.stop(stopped)


def _make(calls: Sequence[Call], stopped: threading.Event) -> list[tuple[Call, Reply, float]]:
    host = calls[0].function.host
    with host.places:  # which several rounds share
        started = time.monotonic()
        replies = host.make(calls, stopped)
        seconds = (time.monotonic() - started) / len(calls)
    return [(call, reply, seconds) for call, reply in zip(calls, replies, strict=True)]
