"""`Sandbox`: run a program, call a function of its, check it by tests or compile it, without trusting it."""

import json
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import TracebackType
from typing import Any, Literal, Self, get_args

from gspo.errors import UserError
from gspo.sandbox import plain
from gspo.sandbox.server import Server, ServerDiedError

Ending = Literal["finished", "failed", "cpu_time", "wall_time", "memory", "output", "files", "crashed"]
MAX_ERROR_CHARACTERS = 1000
SPARE_SECONDS = 30.0  # after the wall time, for the server of a busy machine to say that it is over


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use, of all its processes together; wall_seconds None is 5 · cpu_seconds + 10."""

    cpu_seconds: float = 6.0
    wall_seconds: float | None = None  # for programs that sleep: a busy machine must not reach it
    memory_bytes: int = 2**30  # the files in /tmp and /dev/shm included
    output_bytes: int = 2**24
    processes: int = 40  # threads too: an executor without a number takes up to 32

    @property
    def wall(self) -> float:
        """The seconds of wall time."""
        return 5 * self.cpu_seconds + 10 if self.wall_seconds is None else self.wall_seconds


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of a run."""

    ending: Ending  # finished: exit status 0, or the call returned; failed: an exception, or another exit status
    output: bytes  # standard output, at most output_bytes
    error: str  # the end of standard error, or the exception
    value: Any = None  # what the function returned, as plain data
    cpu_seconds: float = 0.0


class Sandbox:
    """A place for programs that nobody trusts; to be used by one thread at a time. UserError where there can be none.

    The packages can be imported inside, from where they are installed; a name that is not installed is left out, and
    "*" is all of them and gspo's own. The modules of `warm` are imported once, before the programs are forked.
    """

    def __init__(self, *, packages: Sequence[str] = ("numpy",), warm: Sequence[str] = ()) -> None:
        check_available()
        self._packages, self._warm = tuple(packages), tuple(warm)
        self._servers: dict[str, Server] = {}  # of the programs, of tests and of the compiler; each when it is wanted
        self._is_whole = True  # no exception has left an operation in its midst, with programs that still run
        weakref.finalize(self, _end_all, self._servers)

    def run(self, program: str | bytes, stdin: bytes = b"", limits: Limits = Limits()) -> Ran:
        """Run Python source as the main module, or an executable file that `compile_cpp` made."""
        return self._twice(self._run, "programs", program, stdin, limits)

    def call(self, source: str, function: str, arguments: Sequence[Any], limits: Limits = Limits()) -> Ran:
        """Run the source, then its function, or the method of its class Solution, on plain data."""
        return self._twice(self._call, source, function, arguments, limits)

    def check(self, source: str, tests: str, functions: Sequence[str], limits: Limits = Limits()) -> Ran:
        """Run tests of the program's functions in another sandbox; "finished" where they ran to their very end.

        The tests have stand-ins for the functions, which pass plain data: no object of the program's reaches the
        tests, and no expected value reaches the program. Arguments are copies, so the tests see no change of them.
        """
        return self._twice(self._check, source, tests, functions, limits)

    def compile_cpp(self, source: str, limits: Limits = Limits(cpu_seconds=20.0, output_bytes=2**26)) -> bytes | str:
        """The executable that g++ makes of C++17 source, or its complaint; UserError where there is no g++."""
        script = _COMPILE.format(compiler=find_compiler())
        ran = self._twice(self._run, "compiler", script, source.encode(errors="replace"), limits)
        if ran.ending == "finished":
            return ran.output
        return ran.error if ran.ending == "failed" else f"g++ ended by its limit: {ran.ending}"

    def close(self) -> None:
        """End all processes."""
        _end_all(self._servers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _server(self, name: str) -> Server:
        server = self._servers.get(name)
        if server is None or not server.is_alive():
            self._end(name)
            server = self._servers[name] = Server(self._packages, self._warm, compiler=name == "compiler")
        return server

    def _end(self, name: str) -> None:
        if server := self._servers.pop(name, None):
            server.end()

    def _twice(self, operation: Callable[..., Ran], *arguments: Any) -> Ran:
        """Run the operation, and again where a server died: by the end of the thread that started it, for example.

        After an exception, which a signal may raise at any point, here too, no server of the operation is used again.
        """
        for _ in range(2):
            try:
                if not self._is_whole:
                    _end_all(self._servers)
                self._is_whole = False
                ran = operation(*arguments)
                self._is_whole = True
                return ran
            except ServerDiedError as died:
                if died.is_late:
                    return Ran(ending="wall_time", output=b"", error="the sandbox did not answer in time")
            finally:
                if not self._is_whole:
                    _end_all(self._servers)
        return Ran(ending="crashed", output=b"", error="the sandbox ended")

    def _run(self, name: str, program: str | bytes, stdin: bytes, limits: Limits) -> Ran:
        mode = "executable" if isinstance(program, bytes) else "program"
        started = _Started(self, name, mode, program, limits, stdin=stdin)
        ran = started.receive()
        if not isinstance(ran, Ran):
            raise ServerDiedError  # such a program has nothing to say
        return ran

    def _call(self, source: str, function: str, arguments: Sequence[Any], limits: Limits) -> Ran:
        program = _Started(self, "programs", "functions", source, limits)
        if isinstance(ready := program.receive(), Ran):
            return _failed(ready)
        if isinstance(reply := program.ask(plain.dumps((function, tuple(arguments), {}))), Ran):
            return _failed(reply)
        ran = program.stop()
        if ran.ending not in ("finished", "failed"):  # it has exceeded a limit, or died, after it had answered
            return ran
        try:
            return replace(ran, ending="finished", value=plain.loads(reply.get("returned")))
        except ValueError:
            return replace(ran, ending="failed", error=_text(reply, "text") or "it answers what is no plain data")

    def _check(self, source: str, tests: str, functions: Sequence[str], limits: Limits) -> Ran:
        program = _Started(self, "programs", "functions", source, limits)
        if isinstance(ready := program.receive(), Ran):
            return _failed(ready)
        checker = _Started(self, "tests", "tests", tests, limits, functions=list(functions))
        failed: Ran | None = None
        while not isinstance(asked := checker.receive(), Ran):
            if "ended" in asked:
                checker.is_over = True
                continue
            reply = program.ask(str(asked.get("call")).encode(errors="replace"))
            if isinstance(reply, Ran):  # it ended in the midst of the tests
                failed = _failed(reply)
                checker.tell_to_stop()
                continue
            checker.say(json.dumps(_checked(reply)).encode())
        ran = failed or program.stop()
        ran = replace(ran, cpu_seconds=ran.cpu_seconds + asked.cpu_seconds)
        if failed or ran.ending not in ("finished", "failed"):
            return ran
        if checker.is_over and asked.ending == "finished":
            return replace(ran, ending="finished")
        ending = "failed" if asked.ending == "finished" else asked.ending
        return replace(ran, ending=ending, error=asked.error or "the tests did not run to their end")


class _Started:
    """A run under way in one of the sandbox's servers: frames to it and from it."""

    def __init__(
        self, sandbox: Sandbox, name: str, mode: str, program: str | bytes, limits: Limits, **more: Any
    ) -> None:
        self._sandbox, self._name, self._server = sandbox, name, sandbox._server(name)
        self._max_bytes, self.is_over = limits.output_bytes, False
        self._deadline = time.monotonic() + limits.wall + SPARE_SECONDS
        source = program.encode(errors="surrogatepass") if isinstance(program, str) else program
        body = source + more.pop("stdin", b"")
        more["limits"] = {**vars(limits), "wall_seconds": limits.wall}
        self._server.send(body, self._deadline, mode=mode, program_bytes=len(source), **more)

    def say(self, message: bytes) -> None:
        """Send the program a message."""
        self._server.send(message, self._deadline, message=True)

    def ask(self, call: bytes) -> "dict[str, Any] | Ran":
        """What the program answers to a call, or how it ended instead."""
        self.say(call)
        return self.receive()

    def tell_to_stop(self) -> None:
        """Have the run ended, whatever it does."""
        self._server.send(b"", self._deadline, stop=True)

    def stop(self) -> Ran:
        """End the run; what came of it, where "failed" is that it had not ended by itself."""
        self.tell_to_stop()
        while not isinstance(ran := self.receive(), Ran):
            pass
        return ran

    def receive(self) -> "dict[str, Any] | Ran":
        """The next message of the program, or how it ended."""
        header, body = self._server.receive(self._deadline, self._max_bytes)
        if "ended" not in header:
            return _message(body)
        if header.get("is_clean") is not True:  # files that it could not remove: the next run must not find them
            self._sandbox._end(self._name)
        ending: Any = header["ended"] if header["ended"] in get_args(Ending) else "failed"
        seconds = header["cpu"] if isinstance(header.get("cpu"), float) else 0.0
        return Ran(ending=ending, output=body, error=_text(header, "error"), cpu_seconds=seconds)


def _message(line: bytes) -> dict[str, Any]:
    """A program's message; what is none is a failure of it."""
    with suppress(Exception):
        if isinstance(message := json.loads(line), dict):
            return message
    return {"raised": "RuntimeError", "message": "no message"}


def _checked(reply: dict[str, Any]) -> dict[str, str]:
    """A program's answer to its tests, written anew: nothing but plain data, or the name of an exception."""
    try:
        return {"returned": plain.dumps(plain.loads(reply.get("returned"))).decode()}
    except Exception:
        return {key: _text(reply, key) for key in ("raised", "message")}


def _text(said: dict[str, Any], key: str) -> str:
    """The end of a text that a program may have written; empty where it is none."""
    text = said.get(key)
    return text[-MAX_ERROR_CHARACTERS:].encode(errors="replace").decode() if isinstance(text, str) else ""


def _failed(ran: Ran) -> Ran:
    """The run of a program that ended before its function answered, which "finished" must not say."""
    if ran.ending != "finished":
        return ran
    return replace(ran, ending="failed", error=ran.error or "the program ended before its function returned")


def _end_all(servers: dict[str, Server]) -> None:
    for name in list(servers):
        servers[name].end()
        servers.pop(name, None)


def find_compiler() -> str:
    """The program g++; UserError where there is none."""
    if compiler := shutil.which("g++"):
        return compiler
    raise UserError("C++ cannot be compiled: there is no g++", fix="install it: apt install g++ (Debian, Ubuntu)")


@cache
def check_available() -> None:
    """UserError where this machine cannot isolate: what is missing and what to install."""
    Server((), ()).end()


_COMPILE = """
import subprocess, sys
command = [{compiler!r}, "-O2", "-std=c++17", "-pipe", "-x", "c++", "-", "-o", "/tmp/a.out"]
status = subprocess.run(command).returncode
if status == 0:
    with open("/tmp/a.out", "rb") as file:
        sys.stdout.buffer.write(file.read())
sys.exit(status)
"""
