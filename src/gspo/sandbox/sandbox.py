"""`Sandbox`: run a program, call a function of its, check it by tests or compile it, without trusting it."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import IO, Any, Literal, Self, get_args

from gspo.errors import UserError
from gspo.sandbox import plain
from gspo.sandbox.isolation import LOADER_VARIABLES, find_bubblewraps, isolated_command
from gspo.sandbox.seccomp import compile_filter

Ending = Literal["finished", "failed", "cpu_time", "wall_time", "memory", "output", "files", "crashed"]
MAX_ERROR_CHARACTERS = 1000
START_SECONDS = 120.0
MAX_REPLY_BYTES = 2**12
_VARIABLES = {
    "LD_BIND_NOW": "1",  # what is linked at the start need not be linked in each fork
    "PYTHONHASHSEED": "0",  # what an order of hashes decides can be repeated
}
_REFUSED = (
    "bubblewrap needs user namespaces, a mount of /proc and version 0.8 or newer. Ubuntu 24.04: allow bwrap user "
    "namespaces (an AppArmor profile, or sysctl kernel.apparmor_restrict_unprivileged_userns=0). Docker: run with "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined. docs/sandbox.md says more"
)
SPARE_SECONDS = 30.0  # after the wall time, for the server of a busy machine to say that it is over


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one run, of all its processes together; wall_seconds None is 5 · cpu_seconds + 10."""

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
    """The outcome of a run."""

    ending: Ending  # finished: exit status 0, or the call returned; failed: an exception, another status
    output: bytes  # standard output, at most output_bytes
    error: str  # the end of standard error, or the exception
    value: Any = None  # what the function returned, as plain data
    cpu_seconds: float = 0.0


class ServerDiedError(Exception):
    """The server has ended, or says what is no message."""


class Server:
    """The harness in a sandbox, seen from outside, where it may be hostile; UserError where it cannot start."""

    def __init__(self, packages: Sequence[str], warm: Sequence[str], *, compiler: bool = False) -> None:
        *others, last = find_bubblewraps()
        for bubblewrap in others:  # a profile of AppArmor, or the rights of directories, may allow the last alone
            with suppress(UserError):
                self._start(bubblewrap, packages, warm, compiler)
                return
        self._start(last, packages, warm, compiler)

    def _start(self, bubblewrap: str, packages: Sequence[str], warm: Sequence[str], compiler: bool) -> None:
        self._link, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("filter"), "r+b") as file:
            file.write(compile_filter())
            file.seek(0)
            try:
                self._process = subprocess.Popen(
                    isolated_command(bubblewrap, file.fileno(), packages, warm, compiler),
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[file.fileno()],
                    env={name: os.environ[name] for name in LOADER_VARIABLES if name in os.environ} | _VARIABLES,
                    cwd="/",
                )
            except OSError as error:
                self._link.close()
                raise UserError(f"code cannot be isolated: {error}", fix=_REFUSED) from None
        try:
            self.receive(time.monotonic() + START_SECONDS)
        except (ServerDiedError, TimeoutError):
            self._process.kill()
            assert self._process.stdout
            said = self._process.stdout.read(4000).decode(errors="replace").strip()
            self.end()
            what = f"code cannot be isolated: the sandbox does not start: {said or 'it says nothing'}"
            raise UserError(what, fix=_REFUSED) from None

    def send(self, header: dict[str, Any], files: Sequence[int]) -> None:
        """Send a request for a run, with its files."""
        with suppress(OSError):  # it has ended: `receive` says so
            socket.send_fds(self._link, [json.dumps(header).encode()], files)

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message; ServerDiedError where there is none, TimeoutError where there is none in time."""
        self._link.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            if isinstance(said := json.loads(self._link.recv(MAX_REPLY_BYTES)), dict):
                return said
        except TimeoutError:
            raise
        except Exception:  # it may say anything
            pass
        raise ServerDiedError

    def end(self) -> None:
        """Kill it with all that runs inside, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._link.close()
        assert self._process.stdout
        self._process.stdout.close()


class Sandbox:
    """A place for programs that nobody trusts, for one thread at a time; UserError where there can be none.

    The packages can be imported inside, from where they are installed; a name that is not installed is left
    out, and "*" is all of them and gspo's own. The modules of `warm` are imported once, before runs are forked.
    """

    def __init__(self, *, packages: Sequence[str] = ("numpy",), warm: Sequence[str] = ()) -> None:
        check_available()
        self._packages, self._warm = tuple(packages), tuple(warm)
        self._servers: dict[str, Server] = {}  # of programs, tests and the compiler; each when it is wanted
        self._codes: dict[str, tuple[bytes, IO[bytes]]] = {}  # each server's last program, and its code
        self._files = ExitStack()  # of the operation under way
        self._is_busy = False  # with an operation, or still with one that an exception has ended
        weakref.finalize(self, _end_all, self._servers)

    def run(self, program: str | bytes, stdin: bytes = b"", limits: Limits = Limits()) -> Ran:
        """Run Python source as the main module, or an executable file that `compile_cpp` made."""
        return self._twice(self._run, "programs", program, stdin, limits)

    def call(self, source: str, function: str, arguments: Sequence[Any], limits: Limits = Limits()) -> Ran:
        """Run the source, then its function, or the method of its class Solution, on plain data."""
        return self._twice(self._call, source, function, arguments, limits)

    def check(self, source: str, tests: str, functions: Sequence[str], limits: Limits = Limits()) -> Ran:
        """Run tests of the program's functions in another sandbox; "finished" where they ran to their end.

        The tests have stand-ins for the functions, which pass plain data: no object of the program's reaches
        the tests, and no expected value the program. Arguments are copies: the tests see no change of them.
        """
        return self._twice(self._check, source, tests, functions, limits)

    def compile_cpp(self, source: str, limits: Limits = Limits(cpu_seconds=20.0, output_bytes=2**26)) -> bytes | str:
        """The executable that g++ makes of C++17, or its complaint; UserError where there is no g++."""
        if not (compiler := shutil.which("g++")):
            fix = "install it: apt install g++ (Debian, Ubuntu)"
            raise UserError("C++ cannot be compiled: there is no g++", fix=fix)
        script = _COMPILE.format(compiler=compiler)
        ran = self._twice(self._run, "compiler", script, source.encode(errors="replace"), limits)
        if ran.ending == "finished":
            return ran.output
        return ran.error if ran.ending == "failed" else f"g++ ended by its limit: {ran.ending}"

    def close(self) -> None:
        """End all processes."""
        _end_all(self._servers)
        self._codes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _twice(self, operation: Callable[..., Ran], *arguments: Any) -> Ran:
        """Run the operation, and again where a server died, as with the thread that started it.

        After an exception, which a signal may raise at any point, here too, no server is used again.
        """
        for _ in range(2):
            if self._is_busy:
                _end_all(self._servers)
            self._is_busy = True
            try:
                with self._files:
                    ran = operation(*arguments)
                self._is_busy = False
                return ran
            except TimeoutError:
                return Ran(ending="wall_time", output=b"", error="the sandbox did not answer in time")
            except ServerDiedError:
                pass
        return Ran(ending="crashed", output=b"", error="the sandbox ended")

    def _run(self, name: str, program: str | bytes, stdin: bytes, limits: Limits) -> Ran:
        mode = "executable" if isinstance(program, bytes) else "program"
        return self._start(name, mode, program, limits, stdin=stdin)()

    def _call(self, source: str, function: str, arguments: Sequence[Any], limits: Limits) -> Ran:
        asked, replied = self._file(plain.dumps((function, tuple(arguments), {})) + b"\n"), self._file()
        ran = self._start("programs", "call", source, limits, calls=(asked, replied))()
        if ran.ending != "finished":
            return replace(ran, error=ran.error or _EARLY)
        try:
            reply = json.loads(_read(replied, 2 * plain.MAX_BYTES).partition(b"\n")[0])
            if "returned" in reply:
                return replace(ran, value=plain.loads(reply["returned"]))
            error = str(reply["text"])[-MAX_ERROR_CHARACTERS:].encode(errors="replace").decode()
        except Exception:  # a program has written it
            error = "it answers what is no plain data"
        return replace(ran, ending="failed", error=error)

    def _check(self, source: str, tests: str, functions: Sequence[str], limits: Limits) -> Ran:
        with ExitStack() as given_away:
            (asked, ask), (replied, reply) = os.pipe(), os.pipe()
            for number in (asked, ask, replied, reply):
                given_away.callback(os.close, number)
            program = self._start("programs", "functions", source, limits, calls=(asked, reply))
            checker = self._start("tests", "tests", tests, limits, calls=(replied, ask), functions=functions)
        tested, ran = checker(), program()
        ran = replace(ran, cpu_seconds=ran.cpu_seconds + tested.cpu_seconds)
        if ran.ending != "finished":
            return replace(ran, error=ran.error or _EARLY)
        if tested.ending == "finished":
            return ran
        return replace(ran, ending=tested.ending, error=tested.error or "the tests did not run to their end")

    def _file(self, content: bytes | None = None) -> int:
        """A file in memory, for this operation: to write into, or with a content that nobody can change."""
        number = os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._files.callback(os.close, number)
        if content is not None:
            os.pwrite(number, content, 0)
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
        return number

    def _start(self, name: str, mode: str, program: str | bytes, limits: Limits, **more: Any) -> Callable[[], Ran]:
        """Begin a run, with its `stdin`, the files of `calls`, the `functions` to call; what waits for it."""
        source = program.encode(errors="surrogatepass") if isinstance(program, str) else program
        files = [self._file(more.get("stdin", b"")), self._file(), self._file(), self._file(source)]
        if name not in self._codes or self._codes[name][0] != source:
            self._codes[name] = source, os.fdopen(os.memfd_create("code"), "r+b", buffering=0)
        files.append(self._codes[name][1].fileno())
        if name not in self._servers:
            self._servers[name] = Server(self._packages, self._warm, compiler=name == "compiler")
        allowed = {**vars(limits), "wall_seconds": limits.wall}
        header = {"mode": mode, "limits": allowed, "functions": more.get("functions")}
        self._servers[name].send(header, [*files, *more.get("calls", ())])
        deadline = time.monotonic() + limits.wall + SPARE_SECONDS
        return lambda: _wait(self._servers[name], deadline, files, limits)


def _wait(server: Server, deadline: float, files: Sequence[int], limits: Limits) -> Ran:
    """Return what came of a run, when it has ended."""
    said = server.receive(deadline)
    ending: Any = said.get("ending") if said.get("ending") in get_args(Ending) else "failed"
    cpu = said["cpu"] if isinstance(said.get("cpu"), float) else 0.0
    error = _read(files[2], limits.output_bytes).decode(errors="replace")[-MAX_ERROR_CHARACTERS:]
    return Ran(ending=ending, output=_read(files[1], limits.output_bytes), error=error, cpu_seconds=cpu)


def _read(number: int, max_bytes: int) -> bytes:
    """So many bytes of what a run has written into a file, at most."""
    return os.pread(number, min(os.fstat(number).st_size, max_bytes), 0)


def _end_all(servers: dict[str, Server]) -> None:
    for name in list(servers):
        servers[name].end()
        servers.pop(name, None)


@cache
def check_available() -> None:
    """Raise UserError where this machine cannot isolate: what is missing and what to install."""
    Server((), ()).end()


_EARLY = "the program ended before its function returned"
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_COMPILE = """
import os, subprocess, sys
command = [{compiler!r}, "-O2", "-std=c++17", "-pipe", "-x", "c++", "-", "-o", "/tmp/a.out"]
status = subprocess.run(command).returncode
if status == 0:
    with open("/tmp/a.out", "rb") as file:
        os.unlink("/tmp/a.out")
        sys.stdout.buffer.write(file.read())
sys.exit(status)
"""
