"""The process in which a reward function runs; `processes` starts it, and it ends when the trainer does."""

import asyncio
import faulthandler
import json
import os
import pickle
import resource
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from gspo.errors import UserError
from gspo.reward.builtin import find_function, math
from gspo.reward.code import try_sandbox
from gspo.reward.limits import end_tree
from gspo.reward.reply import Reply, reply_of, reply_of_coroutine, timed_out

MAX_VERIFIER_BYTES = 4 * 2**30
OVERTIME_SECONDS = 5.0  # the trainer ends a call at its limit; where it cannot any more, the process ends itself then
LONGEST_TIMER_SECONDS = 1e9

Function = Callable[..., Any]
Role = Literal["reward function", "tool", "agent", "MCP server"]
Request = tuple[int, bytes, float]  # the number of completions, the pickled arguments, the time limit in seconds

_nowhere = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process lives


def main(
    *, descriptor: int, mark: str, name: str, is_async: bool, is_verifier: bool, role: Role, path: list[str]
) -> None:
    """Import the function, say so, and make calls until the trainer is gone."""
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    os.register_at_fork(after_in_child=link.close)  # the trainer must see this process end, whoever survives it
    sys.path[:] = path
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    received: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(link, received.put, mark), daemon=True).start()
    if is_verifier:
        for limit, value in ((resource.RLIMIT_AS, MAX_VERIFIER_BYTES), (resource.RLIMIT_CORE, 0)):
            with suppress(ValueError, OSError):  # macOS refuses the first
                resource.setrlimit(limit, (value, value))
    ready = Reply()
    try:
        function = find_function(name) if role == "reward function" else _find_tool(name, role)
        _prepare(name)
    except UserError as error:
        ready = Reply(user_error=(error.what, None, error.fix))
    except Exception as error:
        ready = Reply(user_error=(f"preparing it raises {type(error).__name__}: {error}", None, None))
    number, *_ = received.get()  # the question whether it is ready
    _send(link, number, ready)
    if is_async:
        asyncio.run(_serve(link, function, received))
    while True:
        number, size, arguments, _, seconds = received.get()
        _end_self_after(seconds)
        reply = reply_of(function, partial(pickle.loads, arguments), size)  # here, where alarms work
        faulthandler.cancel_dump_traceback_later()
        _send(link, number, reply)


async def _serve(link: socket.socket, function: Function, received: SimpleQueue[Any]) -> None:
    """Make the calls of an async function at the same time."""

    async def make(number: int, size: int, arguments: bytes, limit: float) -> None:
        # One that does not end when it is cancelled holds all up, until the trainer ends the process.
        reply = timed_out(limit)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit) as timer:
                reply = await reply_of_coroutine(function, partial(pickle.loads, arguments), size)
            reply = timed_out(limit) if timer.expired() else reply
        _send(link, number, reply)

    tasks: set[asyncio.Task[None]] = set()
    while True:
        number, size, arguments, limit, seconds = await asyncio.to_thread(received.get)
        _end_self_after(seconds)
        task = asyncio.create_task(make(number, size, arguments, limit))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: None if tasks else faulthandler.cancel_dump_traceback_later())


def _find_tool(name: str, role: Role) -> Function:
    # pydantic takes a while, and rewards need none of it
    from gspo.reward.mcp_server import McpServer
    from gspo.reward.tool_functions import as_agent, as_tool, find_tool

    if role == "MCP server":
        return McpServer(name)
    return as_tool(find_tool(name)) if role == "tool" else as_agent(find_tool(name))


def _end_self_after(seconds: float) -> None:
    """Let a timer outside Python end this process, which a call that holds the interpreter cannot stop."""
    limit = min(seconds + OVERTIME_SECONDS, LONGEST_TIMER_SECONDS)
    faulthandler.dump_traceback_later(limit, exit=True, file=_nowhere)


def _prepare(name: str) -> None:
    """Import what would delay the first answer."""
    if name == "math":
        assert math(["q"], [r"\boxed{(x - 1)(x + 1)}"], answer=["x^2 - 1"], seconds_per_answer=60.0) == [1.0]
    elif name == "reasoning_gym":
        import gspo.reward.gym  # noqa: F401
    elif name == "code":
        try_sandbox()


def _read(link: socket.socket, deliver: Callable[[Any], Any], mark: str) -> None:
    try:  # no makefile: with one, a fork could not close the link
        with os.fdopen(link.fileno(), "rb", closefd=False) as requests:
            while True:
                deliver(pickle.load(requests))
    finally:
        end_tree(os.getpid(), mark)  # the trainer is gone, whatever way it went


def _send(link: socket.socket, number: int, reply: Reply) -> None:
    line = json.dumps([number, vars(reply)], ensure_ascii=False) + "\n"
    with suppress(OSError):  # the reading thread sees that the trainer is gone
        link.sendall(line.encode(errors="replace"))  # a half of a surrogate pair has no bytes
