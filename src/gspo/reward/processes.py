"""Calls in worker processes: for functions named in the recipe, which a process can import for itself."""

import os
import pickle
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.reward.calls import Call, Events
from gspo.reward.reply import Reply, read_reply
from gspo.reward.worker_process import WorkerProcess, how_it_ended

MAX_PROCESSES = 8
MAX_COROUTINES = 32
LOOP_ANSWER_SECONDS = 1.0


class Processes:
    """A host with worker processes of one function: a call a process, or all of them in one for an async function."""

    def __init__(self, function: str, *, is_async: bool, concurrent_calls: int | None = None) -> None:
        self._function = function
        self._is_async = is_async
        self._calls_a_worker = (concurrent_calls or MAX_COROUTINES) if is_async else 1
        self._max_workers = 1 if is_async else concurrent_calls or min(MAX_PROCESSES, os.cpu_count() or 1)
        environment = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._setup = {"name": function, "is_async": is_async, "path": path, "environment": environment}
        self._directory = Path.cwd()
        self._workers: list[WorkerProcess] = []
        self._mailbox = _Mailbox()
        weakref.finalize(self, _end_all, self._workers)  # at the end of the program too

    def open(self) -> None:
        """Start the first process, so that it imports its function while other things are done."""
        if not self._workers:
            self._start_worker()

    def begin(self, events: Events) -> None:
        """End what an interrupted step has left running; from now on events go to this queue."""
        self.end()
        self._mailbox.open(self, events)

    def start(self, number: int, call: Call) -> bool:
        """Hand a call to a process that has a place; UserError where the processes cannot start."""
        for worker in list(self._workers):
            if not self._has_place(worker, call):
                continue
            self._check(worker)
            if worker in self._workers and worker.ready and not worker.ended:
                request = ("call", number, call.size, self._pickled(call), call.time_limit_seconds)
                worker.running[number] = call
                worker.ask(*request)
                return True
        return False

    def grow(self, num_waiting: int) -> None:
        """Start processes for calls that wait while all others are busy, as many as may be."""
        num_starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self._max_workers and num_starting < num_waiting:
            self._start_worker()
            num_starting += 1

    def settle(self, event: tuple[WorkerProcess, Any]) -> Sequence[tuple[int, Reply | None]]:
        """What a process has said, or that it has ended in the midst of calls."""
        worker, done = event
        if done is not None:
            number, fields = done
            call = worker.running.pop(number, None)
            return [(number, read_reply(fields, call.size))] if call else []
        if worker not in self._workers or not worker.ended or not worker.running:
            return []
        lost, status = list(worker.running), self._drop(worker)
        reply = Reply(kind="crashed", what=worker.garbled or how_it_ended(status))
        # One of several has ended the process, and nothing says which.
        return [(number, reply if len(lost) == 1 else None) for number in lost]

    def cancel(self, number: int) -> float:
        """Kill the call's process at once, or ask an event loop to cancel it."""
        if not self._is_async:
            self.kill(number)
            return 0.0
        worker = self._holder(number)
        worker.cancelled.add(number)
        worker.ask("cancel", number)
        return LOOP_ANSWER_SECONDS

    def kill(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        """Kill the call's process; the calls at fault, and the others that were in it."""
        worker = self._holder(number)
        self._drop(worker)
        blocker = worker.blocked_by
        at_fault = {blocker} if blocker in worker.running else {number} | worker.cancelled & worker.running.keys()
        return [*at_fault], [other for other in worker.running if other not in at_fault]

    def end(self) -> None:
        """Kill the processes that are in the midst of calls."""
        self._mailbox.close()
        for worker in list(self._workers):
            if worker.running:
                self._drop(worker)

    def close(self) -> None:
        """Kill all processes."""
        self._mailbox.close()
        _end_all(self._workers)

    def _start_worker(self) -> None:
        worker = WorkerProcess(self._setup, self._directory, self._mailbox.put)
        self._workers.append(worker)
        worker.listen()

    def _check(self, worker: WorkerProcess) -> None:
        """Drop a worker that has ended idle; UserError for one that could not start."""
        if worker.refusal is None and (worker.running or worker.is_alive()):
            return
        status = self._drop(worker)
        if not worker.ready:
            refusal = worker.refusal or UserError(f"{how_it_ended(status)} while it started")
            raise UserError(refusal.what, where=f"reward function {self._function}", fix=refusal.fix)

    def _has_place(self, worker: WorkerProcess, call: Call) -> bool:
        if call.alone or any(other.alone for other in worker.running.values()):
            return not worker.running
        return len(worker.running) < self._calls_a_worker

    def _pickled(self, call: Call) -> bytes:
        try:
            return pickle.dumps(dict(call.arguments))
        except Exception as error:
            what = f"its arguments cannot be handed to another process: {type(error).__name__}: {error}"
            fix = "give the function from Python, gspo.train(…, reward=function): it then runs in the trainer's process"
            raise UserError(what, where=f"reward function {self._function}", fix=fix) from None

    def _holder(self, number: int) -> WorkerProcess:
        return next(worker for worker in self._workers if number in worker.running)

    def _drop(self, worker: WorkerProcess) -> int:
        status = worker.end()
        self._workers.remove(worker)
        return status


class _Mailbox:
    """Where listening threads put their events; it knows the host during a step only, so that a host can be freed."""

    def __init__(self) -> None:
        self._to: tuple[Processes, Events] | None = None

    def open(self, host: Processes, events: Events) -> None:
        self._to = host, events

    def close(self) -> None:
        self._to = None

    def put(self, worker: WorkerProcess, done: Any) -> None:
        if (to := self._to) is not None:
            host, events = to
            events.put((host, (worker, done)))


def _end_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers[-1].end()
        workers.pop()
