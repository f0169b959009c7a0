"""Reward functions and their calls: many at once, each with a time limit, so that a stuck one costs no other."""

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from gspo.errors import UserError
from gspo.loop import in_thread
from gspo.recipe.sections import Per, RewardConfig
from gspo.reward.reply import Arguments, Reply, reply_of, reply_of_coroutine, timed_out

MAX_CONCURRENT_CALLS = 32
LOOP_ANSWER_SECONDS = 1.0

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # what arguments by name can be for

Function = Callable[..., Any]


def parameters_of(function: Function) -> Sequence[inspect.Parameter]:
    """Return a function's parameters; UserError where it does not tell them, as many written in C do not."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        what = f"{getattr(function, '__name__', function)} does not tell what arguments it takes"
        raise UserError(what, where="reward", fix="wrap it: def reward(completions, **columns): …") from None


class Host(Protocol):
    """The place of a function's calls: processes of its own (Processes), or the trainer's (Threads).

    `make` calls the function for `size` completions once there is a place, and returns the reply and the
    call's seconds; cancelling it ends or abandons the call. `close` ends everything, the processes too.
    """

    async def make(self, function: "RewardFunction", arguments: Arguments, size: int) -> tuple[Reply, float]: ...
    def close(self) -> None: ...


class Threads:
    """A host for functions from Python, which may close over anything: they run in the trainer's own process.

    Each call has a daemon thread; coroutines share an event loop. A stuck thread cannot be ended; it is
    abandoned, and neither holds a place nor keeps the program from ending.
    """

    def __init__(self, num_places: int = MAX_CONCURRENT_CALLS) -> None:
        self._places = asyncio.Semaphore(num_places)

    async def make(self, function: "RewardFunction", arguments: Arguments, size: int) -> tuple[Reply, float]:
        """Make a call; one over its limit is cancelled where it is a coroutine, and else abandoned."""
        async with self._places:
            started = time.monotonic()
            if is_async(function.call):
                coroutine = reply_of_coroutine(function.call, lambda: arguments, size)
                future = asyncio.run_coroutine_threadsafe(coroutine, await _responsive_loop())
            else:
                name = f"reward {function.name}"
                future = in_thread(name, reply_of, function.call, lambda: arguments, size)
            try:
                reply = await asyncio.wait_for(asyncio.wrap_future(future), function.time_limit_seconds)
            except TimeoutError:
                reply = timed_out(function.time_limit_seconds)
            return reply, time.monotonic() - started

    def close(self) -> None:
        """Do nothing: there is no process."""


_loops: list[asyncio.AbstractEventLoop] = []  # clients that a reward function keeps between steps belong to the last


async def _responsive_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop for coroutines; a new one where a coroutine that blocks has made the old one deaf."""
    last = _loops[-1] if _loops else None
    if last is not None:
        answered = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), last)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(answered), LOOP_ANSWER_SECONDS)
            return last
    if last is (_loops[-1] if _loops else None):  # no other call has made one meanwhile
        _loops.append(asyncio.new_event_loop())
        in_thread("reward event loop", _loops[-1].run_forever)
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
    """Tell whether a function, or an object that is called, returns a coroutine."""
    method = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)
