"""Calls in worker processes: for functions named in the recipe, which a process can import for itself."""

import asyncio
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
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

import gspo
from gspo.errors import UserError
from gspo.reward.calls import LONGEST_WAIT_SECONDS, Call
from gspo.reward.limits import MARK, end_tree
from gspo.reward.reply import Reply, timed_out
from gspo.reward.worker import HEADER, Request, framed

START_SECONDS = 120.0
MAX_PROCESSES = 8
MAX_COROUTINES = 32
MAX_REPLY_BYTES = 2**28
CANCEL_SECONDS = 1.0  # within which a coroutine that is cancelled must end
# Without these the interpreter itself may not start; they are the loader's, and say nothing of the user.
LOADER_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
# How an answer ends the process that verifies it: out of CPU time, of memory or of stack.
ANSWERS_FAULT = {-number for number in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)}

_PROGRAM = """
import pickle, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
size = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "big")
setup = pickle.loads(link.recv(size, socket.MSG_WAITALL))
sys.path[:] = [setup["home"], *sys.path, *setup["path"]]
from gspo.reward.worker import main
main(link, setup, sys.argv[2])
"""

MESSAGE = TypeAdapter(tuple[int, Reply])  # the number of the request, and what came of its call


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
        output: int = 2,
    ) -> None:
        self._is_async, self._is_verifier = is_async, is_verifier
        most = MAX_COROUTINES if is_async else min(MAX_PROCESSES, os.cpu_count() or 1)
        self._places = asyncio.Semaphore(concurrent_calls or most)
        self._alone = asyncio.Semaphore(1)  # for a call that is made by itself, since one beside it ended the process
        self._where = f"reward function {function}"
        path = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]  # noqa: PTH100
        self._setup: dict[str, Any] = {
            "name": function,
            "is_async": is_async,
            "is_verifier": is_verifier,
            "home": str(Path(gspo.__file__).parents[1]),
            "path": path,
        }
        self._directory, self._output = Path("/") if is_verifier else Path.cwd(), output
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end_all, self._workers)  # at the end of the program too
        self._worker()  # it imports its function while other things are done

    def close(self) -> None:
        """Kill all processes."""
        _end_all(self._workers)

    async def make(self, call: Call) -> tuple[Reply, float]:
        """Make the call in a free process; UserError where the processes cannot start."""
        async with self._places:
            reply, seconds = await self._make(call, self._pickled(call), self._is_async)
        if reply is not None:
            return reply, seconds
        async with self._alone:  # one of several has ended the process or held it up, and nothing says which
            reply, seconds_alone = await self._make(call, self._pickled(call), False)
        assert reply is not None
        return reply, seconds + seconds_alone

    async def _make(self, call: Call, arguments: bytes, is_shared: bool) -> tuple[Reply | None, float]:
        """None where the process has ended with calls of others in it."""
        size, limit = len(call.samples), call.function.time_limit_seconds
        # A verifier's responses have each a limit of CPU time; several that reach it must not mask their group.
        seconds = limit * size if self._is_verifier else limit + CANCEL_SECONDS * self._is_async
        worker = self._worker(is_shared=is_shared)
        worker.num_calls, worker.takes_others = worker.num_calls + 1, is_shared
        worker.is_shared = worker.num_calls > 1
        reply, started = None, time.monotonic()
        try:
            await worker.wait_until_ready(self._where)
            started = time.monotonic()
            reply = await worker.ask((size, arguments, limit), seconds)
            is_late = reply is None and time.monotonic() - started >= seconds
            status = 0 if reply is not None else await asyncio.to_thread(worker.end)
        except asyncio.CancelledError:
            if worker.num_calls == 1:  # others' calls go on
                await asyncio.shield(asyncio.to_thread(worker.end))
            raise
        finally:
            worker.num_calls -= 1
        seconds = time.monotonic() - started
        if reply is not None or worker.is_shared:
            return reply, seconds
        if is_late:
            return timed_out(limit), seconds
        if self._is_verifier and status in ANSWERS_FAULT and size == 1:
            return Reply(values=[0.0]), seconds
        return Reply(kind="crashed", what=worker.garbled or how_it_ended(status)), seconds

    def _pickled(self, call: Call) -> bytes:
        try:
            return pickle.dumps(call.arguments)
        except Exception as error:
            what = f"its arguments cannot be handed to another process: {type(error).__name__}: {error}"
            fix = "give the function from Python, gspo.train(…, reward=function): it then runs in the trainer's process"
            raise UserError(what, where=self._where, fix=fix) from None

    def _worker(self, *, is_shared: bool = False) -> "_Worker":
        """One that is free or, where calls share it, whichever there is; a new one else."""
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

    def __init__(self, setup: Mapping[str, Any], directory: Path, output: int) -> None:
        self.num_calls = 0
        self.takes_others = self.is_shared = (
            False  # whether several calls may be, and have been, in it at the same time
        )
        self.garbled = ""  # what it said last, where that is no message
        self._mark, self._ending, self._numbers = uuid.uuid4().hex, threading.Lock(), count()
        self._link, worker_link = socket.socketpair()
        self._sending = asyncio.Lock()
        self._replies: dict[int, tuple[int, asyncio.Future[Reply | None]]] = {}  # that are due: how many values
        self._given_up: set[int] = set()  # whose replies nobody waits for any more
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Task[Reply | None] | None = None
        names = LOADER_VARIABLES if setup["is_verifier"] else tuple(os.environ)
        with worker_link:
            self._process = subprocess.Popen(
                # -P: a file in the working directory that bears a standard module's name must not stand in for it.
                [sys.executable, "-P", "-c", _PROGRAM, str(worker_link.fileno()), self._mark],
                pass_fds=[worker_link.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,  # what a function prints is seen, and passes for nothing else
                stderr=output,
                cwd=directory,
                env={**{name: os.environ[name] for name in names if name in os.environ}, MARK: self._mark},
                start_new_session=True,  # Ctrl-C is for the trainer, which still wants its answers
            )
        with suppress(OSError):  # it has ended already, which shows when it is asked
            self._link.sendall(framed(pickle.dumps(setup)))
        self._link.setblocking(False)

    def is_alive(self) -> bool:
        """Whether the process has not ended; one that has is not waited for."""
        try:
            return self._process.returncode is None and psutil.Process(self._process.pid).status() != "zombie"
        except psutil.NoSuchProcess:
            return False

    async def wait_until_ready(self, where: str) -> None:
        """Wait until the process has imported its function; UserError where it cannot."""
        if self._ready is None:
            self._ready = asyncio.create_task(self.ask((0, b"", 0.0), START_SECONDS))
        started = time.monotonic()
        reply = await asyncio.shield(self._ready)
        if reply is None:
            what = f"{how_it_ended(await asyncio.to_thread(self.end))} while it started"
            if time.monotonic() - started >= START_SECONDS:
                what = f"its process is not ready after {START_SECONDS:g} s"
            raise UserError(what, where=where)
        if refusal := reply.user_error:
            raise UserError(refusal[0], where=where, fix=refusal[2])

    async def ask(self, request: Request, seconds: float) -> Reply | None:
        """The reply; None where the process ends before, or the time is over."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        number, due = next(self._numbers), asyncio.get_running_loop().create_future()
        self._replies[number] = (request[0], due)
        try:
            message = framed(pickle.dumps((number, *request, seconds)))
            async with asyncio.timeout(min(seconds, LONGEST_WAIT_SECONDS)):
                await self._send(message)
                return await due
        except (TimeoutError, OSError):
            return None
        except asyncio.CancelledError:
            self._given_up.add(number)
            raise
        finally:
            self._replies.pop(number, None)

    async def _send(self, message: bytes) -> None:
        async with self._sending:  # messages must not mix
            try:
                await asyncio.get_running_loop().sock_sendall(self._link, message)
            except BaseException:  # nothing can follow half a message
                self.end()
                raise

    async def _read(self) -> None:
        """Hand over replies until the process ends, or says what is none."""
        try:
            while True:
                header = await self._receive(HEADER.size)
                (size,) = HEADER.unpack(header)
                message = header if size > MAX_REPLY_BYTES else await self._receive(size)
                try:
                    number, reply = MESSAGE.validate_json(message, strict=True)
                    if number in self._given_up:
                        self._given_up.discard(number)
                        continue
                    num_values, due = self._replies[number]
                    if not (reply.kind or reply.user_error or len(reply.values) == num_values):
                        raise ValueError("another number of values")
                except (ValueError, KeyError):  # the function may have written it
                    self.garbled = f"its process says what is no message: {message[:80]!r}"
                    return
                if not due.done():
                    due.set_result(reply)
        except (EOFError, OSError):
            return
        finally:
            self._link.close()
            for _, due in self._replies.values():
                if not due.done():
                    due.set_result(None)

    async def _receive(self, size: int) -> bytes:
        parts = []
        while size:
            parts.append(await asyncio.get_running_loop().sock_recv(self._link, min(size, 2**20)))
            if not parts[-1]:
                raise EOFError
            size -= len(parts[-1])
        return b"".join(parts)

    def end(self) -> int:
        """Kill the process with all that it has started; its exit status, as subprocess has it."""
        with self._ending:
            if self._process.returncode is None:
                end_tree(self._process.pid, self._mark)
            if self._reading is None:
                self._link.close()
            return self._process.wait()


def how_it_ended(status: int) -> str:
    """A process's end in words, from its exit status."""
    if status >= 0:
        return f"its process ended with exit status {status}"
    name = {int(number): f" ({number.name})" for number in signal.Signals}.get(-status, "")
    return f"its process was ended by signal {-status}{name}"
