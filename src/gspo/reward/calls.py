"""Reward functions and their calls: many at once, each with a time limit, so that a stuck one costs no other.

A function has a host: the trainer's own process (Threads), or processes that import it (Processes). The
host's `make` calls the function for some completions once there is a place, and returns the reply and the
call's seconds; to cancel it ends or abandons the call. `close` ends everything, the processes too.
"""

import asyncio
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

import gspo
from gspo.errors import UserError
from gspo.loop import in_thread
from gspo.recipe.sections import Per, RewardConfig
from gspo.reward.limits import MARK, end_tree
from gspo.reward.reply import Arguments, Reply, is_async, reply_of, reply_of_coroutine, timed_out
from gspo.reward.worker import Request, Role
from gspo.sandbox.isolation import LOADER_VARIABLES

MAX_CONCURRENT_CALLS = 32
LOOP_ANSWER_SECONDS = 1.0
START_SECONDS = 120.0
MAX_PROCESSES = 8
MAX_COROUTINES = 32
MAX_REPLY_BYTES = 2**28
CANCEL_SECONDS = 1.0  # within which a coroutine that is cancelled must end
# How an answer ends the process that verifies it: out of CPU time, of memory or of stack.
ANSWERS_FAULT = {-number for number in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)}

_PROGRAM = """
import json, sys
setup = json.loads(sys.argv[1])
sys.path[:] = [setup.pop("home"), *sys.path, *setup["path"]]
from gspo.reward.worker import main
main(**setup)
"""

MESSAGE = TypeAdapter(tuple[int, Reply])  # the number of the request, and what came of its call

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # what arguments by name can be for

Function = Callable[..., Any]


def parameters_of(function: Function) -> Sequence[inspect.Parameter]:
    """Return a function's parameters; UserError where it does not tell them, as many written in C do not."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        what = f"{getattr(function, '__name__', function)} does not tell what arguments it takes"
        raise UserError(what, where="reward", fix="wrap it: def reward(completions, **columns): …") from None


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


class Processes:
    """A host with worker processes of one function: a call a process, or all of them in one for an async function.

    The processes of a verifier have no environment, and limits; an answer that ends one is wrong. What they print goes
    to the file descriptor `output`, by default standard error.
    """

    def __init__(
        self,
        function: str,
        *,
        is_async: bool = False,
        concurrent_calls: int | None = None,
        is_verifier: bool = False,
        role: Role = "reward function",
        keeps_state: bool = False,
        output: int = 2,
    ) -> None:
        """One that `keeps_state` has one process at a time, and what was in one that has ended is lost."""
        self._is_async, self._is_verifier, self._keeps_state = is_async, is_verifier, keeps_state
        most = MAX_COROUTINES if is_async else min(MAX_PROCESSES, os.cpu_count() or 1)
        self._places = asyncio.Semaphore(concurrent_calls or most)
        self._alone = asyncio.Semaphore(1)  # for a call that is made by itself, since one beside it ended the process
        self._where = f"{role} {function}"
        self._setup: dict[str, Any] = {
            "name": function,
            "is_async": is_async,
            "is_verifier": is_verifier,
            "role": role,
            "home": str(Path(gspo.__file__).parents[1]),
            "path": [os.path.abspath(path) for path in sys.path if isinstance(path, str)],  # noqa: PTH100
        }
        self._directory, self._output = "/" if is_verifier else str(Path.cwd()), output  # whatever it is later
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end_all, self._workers)  # at the end of the program too
        self._worker()  # it imports its function while other things are done

    def close(self) -> None:
        """Kill all processes."""
        _end_all(self._workers)

    async def make(self, function: "RewardFunction", arguments: Arguments, size: int) -> tuple[Reply, float]:
        """Make the call in a free process; UserError where the processes cannot start."""
        async with self._places:  # those that wait hold no copies of their arguments
            try:
                request = (size, pickle.dumps(arguments), function.time_limit_seconds)
            except Exception as error:
                what = f"its arguments cannot be handed to another process: {type(error).__name__}: {error}"
                fix = "give the function from Python, gspo.train(…, reward=function): the trainer then calls it"
                raise UserError(what, where=self._where, fix=fix) from None
            reply, seconds = await self._make(request, self._is_async)
        if reply is None and not self._keeps_state:
            async with self._alone:  # one of several has ended the process or held it up, and nothing says which
                reply, seconds_alone = await self._make(request, False)
            seconds += seconds_alone
        return reply or Reply(kind="crashed", what="its process has ended"), seconds

    async def _make(self, request: Request, is_shared: bool) -> tuple[Reply | None, float]:
        """Make the call; None in place of a reply where the process has ended with calls of others in it."""
        size, _, limit = request
        # A verifier's responses have each a limit of CPU time; several that reach it must not mask their group.
        seconds = limit * size if self._is_verifier else limit + CANCEL_SECONDS * self._is_async
        worker = self._worker(is_shared)
        worker.num_calls, worker.takes_others = worker.num_calls + 1, is_shared
        worker.is_shared = worker.num_calls > 1
        try:
            await worker.wait_until_ready(self._where)
            started = time.monotonic()
            reply = await worker.ask(request, seconds)
            is_late = time.monotonic() - started >= seconds
            status = 0 if reply is not None else await asyncio.to_thread(worker.end)
        except asyncio.CancelledError:
            if worker.num_calls == 1:  # others' calls go on
                await asyncio.shield(asyncio.to_thread(worker.end))
            raise
        finally:
            worker.num_calls -= 1
        if reply is None and not worker.is_shared:
            if is_late:
                reply = timed_out(limit)
            elif self._is_verifier and status in ANSWERS_FAULT and size == 1:
                reply = Reply(values=[0.0])
            else:
                reply = Reply(kind="crashed", what=worker.garbled or how_it_ended(status))
        return reply, time.monotonic() - started

    def _worker(self, is_shared: bool = False) -> "_Worker":
        """Return a free process, or one that shared calls are in, or a new one."""
        for worker in [*self._workers]:
            if not worker.is_alive():
                worker.end()
                self._workers.remove(worker)
            elif not worker.num_calls or (is_shared and worker.takes_others):
                return worker
        try:
            self._workers.append(_Worker(self._setup, self._directory, self._output))
        except OSError as error:
            raise UserError(f"its process cannot be started: {error}", where=self._where) from None
        return self._workers[-1]


def _end_all(workers: list["_Worker"]) -> None:
    while workers:
        workers.pop().end()


class _Worker:
    """One process. Requests go to it pickled, for arguments may be anything; its replies are JSON, and checked."""

    def __init__(self, setup: Mapping[str, Any], directory: str, output: int) -> None:
        self.num_calls = 0
        self.takes_others = self.is_shared = False  # whether calls may be, and have been, in it together
        self.garbled = ""  # what it said last, where that is no message
        self._mark, self._ending, self._numbers = uuid.uuid4().hex, threading.Lock(), count()
        self._link, worker_link = socket.socketpair()
        self._due: dict[int, tuple[int, asyncio.Future[Reply | None]]] = {}  # of each reply, how many values
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Task[Reply | None] | None = None
        names = LOADER_VARIABLES if setup["is_verifier"] else tuple(os.environ)
        setup = {**setup, "descriptor": worker_link.fileno(), "mark": self._mark}
        with worker_link:
            self._process = subprocess.Popen(
                # -P: a file in the working directory that bears a standard module's name must not stand in for it.
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(setup)],
                pass_fds=[worker_link.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,  # what a function prints is seen, and passes for nothing else
                stderr=output,
                cwd=directory,
                env={**{name: os.environ[name] for name in names if name in os.environ}, MARK: self._mark},
                start_new_session=True,  # Ctrl-C is for the trainer, which still wants its answers
            )

    def is_alive(self) -> bool:
        """Tell whether the process still runs, without waiting for one that has ended."""
        with suppress(psutil.NoSuchProcess):  # a thread has just waited for it
            return self._process.returncode is None and psutil.Process(self._process.pid).status() != "zombie"
        return False

    async def wait_until_ready(self, where: str) -> None:
        """Wait until the process has imported its function; UserError where it cannot."""
        if self._ready is None:
            self._ready = asyncio.create_task(self._connect())
        started = time.monotonic()
        reply = await asyncio.shield(self._ready)
        if reply is None:
            what = f"{how_it_ended(await asyncio.to_thread(self.end))} while it started"
            if time.monotonic() - started >= START_SECONDS:
                what = f"its process is not ready after {START_SECONDS:g} s"
            raise UserError(what, where=where)
        if refusal := reply.user_error:
            raise UserError(refusal[0], where=where, fix=refusal[2])

    async def _connect(self) -> Reply | None:
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._link, limit=MAX_REPLY_BYTES)
        except OSError:  # it has been ended
            return None
        self._reading = asyncio.create_task(self._read(reader))
        return await self.ask((0, b"", 0.0), START_SECONDS)

    async def ask(self, request: Request, seconds: float) -> Reply | None:
        """Return the reply; None where the process ends before, or the time is over."""
        if self._reading is None or self._reading.done():
            return None
        number, due = next(self._numbers), asyncio.get_running_loop().create_future()
        self._due[number] = (request[0], due)
        self._writer.write(pickle.dumps((number, *request, seconds)))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await due
        return None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Deliver replies until the process ends, or sends what is no reply."""
        line = b""
        try:
            while True:
                line = b"a line that is too long"  # where it is longer than the limit, readline raises ValueError
                if not (line := await reader.readline()).endswith(b"\n"):
                    return
                number, reply = MESSAGE.validate_json(line, strict=True)
                num_values, due = self._due[number]
                if not (reply.kind or reply.user_error or len(reply.values) == num_values):
                    raise ValueError("another number of values")
                del self._due[number]
                if not due.done():  # else the call has been given up
                    due.set_result(reply)
        except (ValueError, KeyError):  # the function may have written it
            self.garbled = f"its process says what is no message: {line[:80]!r}"
        except OSError:
            pass  # it has ended
        finally:
            self._writer.close()
            for _, due in self._due.values():
                if not due.done():
                    due.set_result(None)

    def end(self) -> int:
        """Kill the process with all that it has started; return its exit status, as subprocess has it."""
        with self._ending:
            if self._process.returncode is None:
                end_tree(self._process.pid, self._mark)
            if self._reading is None:
                self._link.close()
            return self._process.wait()


def how_it_ended(status: int) -> str:
    """Describe a process's end by its exit status."""
    if status >= 0:
        return f"its process ended with exit status {status}"
    name = {int(number): f" ({number.name})" for number in signal.Signals}.get(-status, "")
    return f"its process was ended by signal {-status}{name}"


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
    host: Threads | Processes = field(default_factory=Threads)  # where calls are made
    per: Per = "response"  # what it gives a number for
    segment_separator: str | None = None  # that the rollouts' segments end with, where it is called per segment
    sources: Sequence[str] = ()  # whose responses it judges; empty: all
    settings: str = ""  # that Python gave with it, other than by default: no recipe has them for a resume to compare
