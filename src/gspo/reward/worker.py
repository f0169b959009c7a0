"""The process in which a reward function runs: `python -m gspo.reward.worker <connection> <mark>`.

Requests come pickled, for arguments may be anything; replies go as JSON, which the trainer can read without trust.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from gspo.errors import UserError
from gspo.reward.named import find_function
from gspo.reward.reply import Reply, reply_of, reply_of_coroutine
from gspo.reward.verifier_process import VERIFIERS

Function = Callable[..., Any]
Request = tuple[Any, ...]  # ("call", number, size, pickled arguments, time limit in seconds) or ("cancel", number)

OVERTIME_SECONDS = 5.0  # the trainer ends a call at its limit; where it cannot any more, the process ends itself then
LONGEST_TIMER_SECONDS = 1e9
BLOCKED_SECONDS = 0.5  # less than the trainer waits for a loop's answer


def main(handle: int, mark: str) -> None:
    """Import the function that the first message names, say so, and make calls until the trainer is gone."""
    link = Connection(handle)
    os.set_inheritable(handle, False)
    os.register_at_fork(after_in_child=link.close)  # the trainer must see this process end, whoever survives it
    try:
        setup = link.recv()
    except EOFError:
        return
    sys.path[:] = setup["path"]
    os.environ.pop("PYTHONPATH", None)
    os.environ.update(setup["environment"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    server = _Coroutines(link) if setup["is_async"] else _Calls(link)
    threading.Thread(target=_read, args=(link, server.deliver, mark), daemon=True).start()
    try:
        function = find_function(setup["name"])
        if setup["name"] in VERIFIERS:
            VERIFIERS[setup["name"]].start()  # no call has to wait for it
    except UserError as error:
        _send(link, "refused", [error.what, error.fix])
        return
    except BaseException as error:
        _send(link, "refused", [f"importing it raises {type(error).__name__}: {error}", None])
        return
    _send(link, "ready")
    server.serve(function)


class _Calls:
    """One call at a time in the main thread, where alarms work."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self.deliver = self._requests.put

    def serve(self, function: Function) -> None:
        while True:
            _, number, size, arguments, limit = self._requests.get()
            _arm(limit)
            reply = reply_of(lambda: function(**pickle.loads(arguments)), function, size)  # noqa: B023
            faulthandler.cancel_dump_traceback_later()
            _send(self._link, "done", [number, vars(reply)])


class _Coroutines:
    """Many calls at once on the main thread's event loop."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[Reply]] = {}

    def deliver(self, request: Request) -> None:
        self._loop.call_soon_threadsafe(self._handle, request)
        if request[0] == "cancel":
            under_way = asyncio.current_task(self._loop)
            timer = threading.Timer(BLOCKED_SECONDS, self._name_blocker, [under_way])
            timer.daemon = True
            timer.start()

    def serve(self, function: Function) -> None:
        self._function = function
        self._loop.run_forever()

    def _handle(self, request: Request) -> None:
        kind, number, *rest = request
        if kind == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        size, arguments, limit = rest
        _arm(limit)
        function = self._function
        work = reply_of_coroutine(lambda: function(**pickle.loads(arguments)), function, size)
        self._tasks[number] = self._loop.create_task(work)
        self._tasks[number].add_done_callback(lambda task: self._done(number, task))

    def _name_blocker(self, task: "asyncio.Task[Any] | None") -> None:
        # A loop that one call holds up answers for none; the time of the others is not theirs.
        if task is not None and asyncio.current_task(self._loop) is task:
            for number in [number for number, its in list(self._tasks.items()) if its is task]:
                _send(self._link, "blocked", number)

    def _done(self, number: int, task: "asyncio.Task[Reply]") -> None:
        del self._tasks[number]
        if not self._tasks:
            faulthandler.cancel_dump_traceback_later()
        reply = Reply() if task.cancelled() else task.result()  # cancelled before it began
        _send(self._link, "done", [number, vars(reply)])


def _arm(limit: float) -> None:
    # Its timer runs outside Python: a call that holds the interpreter for ever cannot stop it.
    seconds = min(limit + OVERTIME_SECONDS, LONGEST_TIMER_SECONDS)
    faulthandler.dump_traceback_later(seconds, exit=True, file=_nowhere)


_nowhere = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process lives


def _read(link: Connection, deliver: Callable[[Request], Any], mark: str) -> None:
    try:
        while True:
            deliver(link.recv())
    except (EOFError, OSError):  # the trainer is gone, whatever way it went
        from gspo.reward.process_tree import end_tree

        end_tree(os.getpid(), mark)


_sending = threading.Lock()


def _send(link: Connection, kind: str, content: Any = None) -> None:
    with _sending, contextlib.suppress(OSError):  # the reading thread sees that the trainer is gone
        link.send_bytes(json.dumps([kind, content]).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
