"""Calls in worker processes: for functions named in the recipe, which a process can import for itself."""

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

import gspo
from gspo.errors import UserError
from gspo.reward.calls import LONGEST_WAIT_SECONDS, Call
from gspo.reward.limits import MARK, end_tree
from gspo.reward.reply import Reply, timed_out
from gspo.reward.worker import Request

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
import sys
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
setup = link.recv()
sys.path[:] = [setup["home"], *sys.path, *setup["path"]]
from gspo.reward.worker import main
main(link, setup, sys.argv[2])
"""

MESSAGE = TypeAdapter(tuple[int, list[Reply]])  # the number of the request, and what came of its calls


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
        self.num_places = 1 if is_async else concurrent_calls or min(MAX_PROCESSES, os.cpu_count() or 1)
        self.places, self.takes_all = threading.Semaphore(self.num_places), is_async
        self._where = f"reward function {function}"
        path = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]  # noqa: PTH100
        self._setup: dict[str, Any] = {
            "name": function,
            "is_async": is_async,
            "num_coroutines": concurrent_calls or MAX_COROUTINES,
            "is_verifier": is_verifier,
            "home": str(Path(gspo.__file__).parents[1]),
            "path": path,
        }
        self._directory, self._output = Path("/") if is_verifier else Path.cwd(), output
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end_all, self._workers)  # at the end of the program too
        self._free_worker()  # it imports its function while other things are done

    def stop(self, stopped: threading.Event) -> None:
        """Kill the processes that are in the midst of a round's calls."""
        with self._lock:
            busy = [worker for worker in self._workers if worker.round is stopped]
        for worker in busy:
            worker.end()

    def close(self) -> None:
        """Kill all processes."""
        _end_all(self._workers)

    def make(self, calls: Sequence[Call], stopped: threading.Event) -> Sequence[Reply]:
        """Make the calls in a free process; UserError where the processes cannot start."""
        request = [(len(call.samples), self._pickled(call), call.function.time_limit_seconds) for call in calls]
        seconds = limit = calls[0].function.time_limit_seconds
        # A verifier's responses have each a limit of CPU time; several that reach it must not mask their group.
        if self._setup["is_verifier"]:
            seconds = limit * len(calls[0].samples)
        if self.takes_all:
            seconds = (limit + CANCEL_SECONDS) * math.ceil(len(calls) / self._setup["num_coroutines"])
        with self._lock:
            if stopped.is_set():
                return [Reply()] * len(calls)
            worker = self._free_worker()
            worker.round = stopped
        try:
            worker.wait_until_ready(self._where)
            started = time.monotonic()
            if (replies := worker.ask(request, seconds)) is not None:
                return replies
            status = worker.end()
            is_late = status == -signal.SIGKILL and time.monotonic() - started >= seconds
        finally:
            worker.round = None
        if len(calls) > 1:  # one of several has ended the process or holds it up, and nothing says which
            return [reply for call in calls for reply in self.make([call], stopped)]
        if is_late:
            return [timed_out(limit)]
        if self._setup["is_verifier"] and status in ANSWERS_FAULT and len(calls[0].samples) == 1:
            return [Reply(values=[0.0])]
        return [Reply(kind="crashed", what=worker.garbled or how_it_ended(status))]

    def _pickled(self, call: Call) -> bytes:
        try:
            return pickle.dumps(call.arguments)
        except Exception as error:
            what = f"its arguments cannot be handed to another process: {type(error).__name__}: {error}"
            fix = "give the function from Python, gspo.train(…, reward=function): it then runs in the trainer's process"
            raise UserError(what, where=self._where, fix=fix) from None

    def _free_worker(self) -> "_Worker":
        for worker in [worker for worker in self._workers if worker.round is None]:
            if worker.is_alive():
                return worker
            worker.end()
            self._workers.remove(worker)
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
        self.round: threading.Event | None = None  # that it makes calls of; the event says that it is stopped
        self._is_ready = False
        self.garbled = ""  # what it said last, where that is no message
        self._mark, self._ending, self._numbers = uuid.uuid4().hex, threading.Lock(), count()
        self._link, worker_link = Pipe()
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
        self._link.send(setup)

    def is_alive(self) -> bool:
        """Whether the process has not ended; one that has is not waited for."""
        try:
            return self._process.returncode is None and psutil.Process(self._process.pid).status() != "zombie"
        except psutil.NoSuchProcess:
            return False

    def wait_until_ready(self, where: str) -> None:
        """Wait until the process has imported its function; UserError where it cannot."""
        if self._is_ready:
            return
        started = time.monotonic()
        replies = self.ask([(0, b"", 0.0)], START_SECONDS)
        if replies is None:
            what = f"{how_it_ended(self.end())} while it started"
            if time.monotonic() - started >= START_SECONDS:
                what = f"its process is not ready after {START_SECONDS:g} s"
            raise UserError(what, where=where)
        if refusal := replies[0].user_error:
            raise UserError(refusal[0], where=where, fix=refusal[2])
        self._is_ready = True

    def ask(self, requests: Sequence[Request], seconds: float) -> list[Reply] | None:
        """A reply to each request; None where the process ends before, or is ended as the time is over."""
        timer = threading.Timer(min(seconds, LONGEST_WAIT_SECONDS), self.end)
        timer.daemon = True
        timer.start()
        number, message = next(self._numbers), b""
        try:
            self._link.send((number, requests, seconds))
            message = self._link.recv_bytes(MAX_REPLY_BYTES)
            answered, replies = MESSAGE.validate_json(message, strict=True)
            pairs = zip(replies, requests, strict=True)
            if answered == number and all(r.kind or r.user_error or len(r.values) == size for r, (size, *_) in pairs):
                return replies
        except (EOFError, OSError):
            return None
        except ValueError:
            pass
        finally:
            timer.cancel()
        self.garbled = f"its process says what is no message: {message[:80]!r}"  # the function may have written it
        return None

    def end(self) -> int:
        """Kill the process with all that it has started; its exit status, as subprocess has it."""
        with self._ending:
            if self._process.returncode is None:
                end_tree(self._process.pid, self._mark)
            return self._process.wait()


def how_it_ended(status: int) -> str:
    """A process's end in words, from its exit status."""
    if status >= 0:
        return f"its process ended with exit status {status}"
    name = {int(number): f" ({number.name})" for number in signal.Signals}.get(-status, "")
    return f"its process was ended by signal {-status}{name}"
