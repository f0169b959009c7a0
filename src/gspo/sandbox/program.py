"""The processes of a sandbox that run its programs, and how its server speaks to them. Standard library only.

The spawner forks a process for each program, which compiles it and forks each of its runs: most of what a run costs is
the memory that it touches after its fork. No data reach the spawner and none but the program reach the program's
process, so that a run finds nothing of another in its memory; and no code of the program's runs in either.
"""

import atexit
import builtins
import ctypes
import functools
import gc
import io
import json
import linecache
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import sys
import traceback
import types
import warnings
from contextlib import suppress
from typing import Any, NoReturn

import plain  # type: ignore[import-not-found]
from channel import Channel  # type: ignore[import-not-found]

READ_BYTES = 2**20  # as many as any pipe holds
KEPT_ERROR_BYTES = 2**13
MAX_FILE_BYTES = 2**27
STACK_BYTES = 2**28
MAX_OPEN_FILES = 64
MAX_SIGNALS = 2**10  # queued, or timers
SPARE_ADDRESS_BYTES = 2**29
NUM_PIPES = 5
ANSWER_SECONDS = 0.5
PROGRAM = "program.py"
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_THP_DISABLE = 4, 36, 41
WAIT_FOR_ALL = 0x4000_0000  # __WALL: also for children that would send no SIGCHLD
# A run's process, or 0 where it has ended; its exit status, its CPU seconds, whether nothing that it started is left.
MESSAGE = struct.Struct("<iid?")
HELD = re.compile(rb"^(?:VmRSS|VmSwap|VmPTE|HugetlbPages):\s*(\d+)", re.MULTILINE)  # KiB, in a process's status
TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Code = types.CodeType | BaseException  # or why there is none
libc = ctypes.CDLL(None)


class Spawner:
    """The process that forks one for each program; made before any has come."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            spawn(theirs)
        theirs.close()

    def start(self) -> socket.socket:
        """A connection to a new process."""
        os.kill(self.pid, signal.SIGCONT)  # if a run has stopped it
        link, theirs = socket.socketpair()
        socket.send_fds(self._link, [b"program"], [theirs.fileno()])
        theirs.close()
        return link


class Program:
    """The process of a program, kept from one run to the next of the same program."""

    def __init__(self, spawner: Spawner, header: dict[str, Any], source: bytes) -> None:
        self.header, self.source = header, source
        self._spawner = spawner.pid
        self._said = 0.0
        self._run: int | None = None
        self.link = spawner.start()
        # A socket takes one more message, which may be of that size, as long as those before it are smaller.
        self._socket_bytes = 2 * self.link.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        Channel(self.link).send(source, **header)

    def start(self, pipes: list[int]) -> None:
        """Have it fork a run that takes these ends of pipes."""
        socket.send_fds(self.link, [str(libc.sched_getcpu()).encode()], pipes)
        for number in pipes:
            os.close(number)

    def hear(self) -> tuple[int, float, bool] | None:
        """Take its message: of a run's end the exit status, CPU seconds and whether nothing of it is left.

        None is of a run's start. Where the process has ended itself, the run counts as killed.
        """
        message = self.link.recv(MESSAGE.size, socket.MSG_WAITALL)
        if len(message) < MESSAGE.size:
            return signal.SIGKILL, self.usage()[0], False
        self._run, status, seconds, is_alone = MESSAGE.unpack(message)
        if self._run:
            return None
        self._said += seconds
        return status, seconds, is_alone

    def kill_run(self) -> bool:
        """Kill the run's first process; whether the message of its end is here."""
        if not self._run:
            return False
        os.kill(self._run, signal.SIGKILL)
        return bool(select.select([self.link], [], [], ANSWER_SECONDS)[0])

    def usage(self) -> tuple[float, int]:
        """CPU seconds of the run that goes on, with all that it has started, and bytes of memory, the kernel's too."""
        # Of all sockets, also those that no process has any more while what they have sent is not read.
        ticks, held = 0, int(read_file("/proc/net/sockstat").split()[2]) * self._socket_bytes
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in (1, self._spawner):
                with suppress(OSError):
                    fields = read_file(f"/proc/{name}/stat").rpartition(b")")[2].split()
                    ticks += sum(map(int, fields[11:15]))
                    held += held_by(name, is_run=int(fields[1]) != self._spawner)
        return ticks / TICKS - self._said, held


def held_by(process: str, *, is_run: bool) -> int:
    """Bytes that a process holds: its pages, its tables of pages and what the kernel keeps of each of its mappings."""
    for thread in os.listdir(folder := f"/proc/{process}/task"):  # the first may have ended, and has no memory then
        if sizes := HELD.findall(read_file(f"{folder}/{thread}/status")):
            try:
                num_mappings = read_file(f"{folder}/{thread}/maps").count(b"\n") if is_run else 0
            except PermissionError:  # it hides them: there may be as many as pages in its address space
                num_mappings = int(read_file(f"{folder}/{thread}/statm").split()[0])
            return sum(map(int, sizes)) * 1024 + num_mappings * PAGE_BYTES
    return 0


def read_file(path: str) -> bytes:
    """What the file holds."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def spawn(link: socket.socket) -> NoReturn:
    """Fork a process for each program, one after another."""
    try:
        close_all_but([link.fileno()])
        while numbers := socket.recv_fds(link, 8, 1)[1]:
            if (pid := os.fork()) == 0:
                serve(socket.socket(fileno=numbers[0]))
            os.close(numbers[0])
            os.waitpid(pid, 0)
    finally:
        os._exit(1)


def serve(link: socket.socket) -> NoReturn:
    """Compile a program, then fork a run of it for each set of pipes that comes, and say when and how that ended."""
    try:
        close_all_but([link.fileno()])
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a run leaves behind becomes a child of this process
        libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # one that is given back in part is kept
        os.chdir("/tmp")
        header, program = Channel(link).receive()
        set_limits(header["limits"])
        code = None if header["mode"] == "executable" else compiled(program)
        gc.freeze()
        everywhere = os.sched_getaffinity(0)
        said = 0.0
        while (request := socket.recv_fds(link, 16, NUM_PIPES))[0]:
            cpu, pipes = int(request[0]), request[1]
            with suppress(OSError):
                os.sched_setaffinity(0, [cpu])  # the server's: to start a run on another takes a quarter longer
            pid = os.fork()
            if pid == 0:
                os.sched_setaffinity(0, everywhere)
                become(header, program, code, pipes)
            for number in pipes:
                os.close(number)
            link.send(MESSAGE.pack(pid, 0, 0.0, False))
            status, is_alone = wait_for(pid), reap_all()
            seconds = spent(resource.RUSAGE_SELF) + spent(resource.RUSAGE_CHILDREN)
            link.send(MESSAGE.pack(0, status, seconds - said, is_alone))
            said = seconds
    finally:
        os._exit(1)


def compiled(program: bytes) -> Code:
    """The program's code, or why it has none; the main module and its source, for tracebacks, are in place then."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [PROGRAM]
    source = program.decode(errors="surrogatepass")
    linecache.cache[PROGRAM] = (len(source), None, source.splitlines(keepends=True), PROGRAM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nobody reads this process's standard error
            return compile(source, PROGRAM, "exec", dont_inherit=True)
    except BaseException as error:
        return error.with_traceback(None)


def wait_for(pid: int) -> int:
    """The exit status of the process, when it has ended."""
    while (ended := os.waitpid(-1, WAIT_FOR_ALL))[0] != pid:
        pass
    return ended[1]


def reap_all() -> bool:
    """Take the exit status of every child that has ended; whether none lives."""
    try:
        while os.waitpid(-1, os.WNOHANG | WAIT_FOR_ALL)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def spent(whose: int) -> float:
    """CPU seconds of this process, or of all its descendants that have been waited for."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def become(header: dict[str, Any], program: bytes, code: Code | None, pipes: list[int]) -> NoReturn:
    """Become a run of the program, in a fork: take its pipes, and run it to its end."""
    try:
        os.setsid()
        for number, pipe in enumerate(pipes[:3]):
            os.dup2(pipe, number)
        close_all_but(pipes[3:])
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        if code is None:
            execute(program)
        calls = [os.fdopen(pipe, mode, buffering=0) for pipe, mode in zip(pipes[3:], ("rb", "wb"), strict=False)]
        run_python(header, code, *calls)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def close_all_but(kept: list[int]) -> None:
    """Close each file descriptor from 3 on, but these."""
    start = 3
    for number in [*sorted(kept), 2**20]:
        os.closerange(start, number)
        start = number + 1


def set_limits(limits: dict[str, Any]) -> None:
    """Set the kernel's limits: for each process what the server, which counts all together, may see too late."""
    for name, value in (
        (resource.RLIMIT_AS, 2 * limits["memory_bytes"] + SPARE_ADDRESS_BYTES),
        (resource.RLIMIT_NPROC, limits["processes"] + 2),  # the server and this process
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_SIGPENDING, MAX_SIGNALS),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        highest = resource.getrlimit(name)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(name, (value, highest if name == resource.RLIMIT_STACK else value))  # programs raise it


def execute(program: bytes) -> NoReturn:
    """Become an executable file."""
    with open("/tmp/program", "wb") as file:
        file.write(program)
    os.chmod("/tmp/program", stat.S_IRUSR | stat.S_IXUSR)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv("/tmp/program", ["/tmp/program"])


def run_python(header: dict[str, Any], code: Code, *calls: Any) -> NoReturn:
    """Run code as the main module, as the interpreter would; then answer calls, where it has functions."""
    main = sys.modules["__main__"]
    if header["mode"] == "tests":
        for name in header["functions"]:
            setattr(main, name, functools.partial(ask, calls, name))
    status = 0
    try:
        if isinstance(code, BaseException):
            raise code
        exec(code, main.__dict__)
        if header["mode"] == "tests":
            say(calls[1], ended=True)
        elif calls:
            answer(main.__dict__, *calls)
    except SystemExit as error:
        status = exit_status(error)
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        status = 1
    try:
        if threading := sys.modules.get("threading"):  # importing it would double what a fork costs
            threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 120  # as the interpreter has it
    os._exit(status & 0xFF)


def exit_status(error: SystemExit) -> int:
    """The exit status that SystemExit asks for."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def say(replies: Any, **message: Any) -> None:
    """Write a message to the client as one line."""
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[replies.write(line) :]


def answer(names: dict[str, Any], requests: Any, replies: Any) -> None:
    """Answer calls of the program's functions until the client has no more."""
    say(replies, ready=True)
    for line in io.BufferedReader(requests):
        name, arguments, keywords = plain.loads(line)
        try:
            function = names[name] if name in names else getattr(names["Solution"](), name)
            returned = plain.dumps(function(*arguments, **keywords))
            sys.stdout.flush()  # the client may have no other call, and end it
        except BaseException as error:
            place = error.__traceback__ and error.__traceback__.tb_next
            text = "".join(traceback.format_exception(type(error), error, place))
            say(replies, raised=type(error).__name__, text=text[-KEPT_ERROR_BYTES:], message=str(error)[:1000])
        else:
            say(replies, returned=returned.decode())


def ask(calls: tuple[Any, Any], name: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of the program's, which runs in another sandbox; what it returns or raises."""
    requests, replies = calls
    say(replies, call=plain.dumps((name, arguments, keywords)).decode())
    reply = json.loads(read_line(requests))
    if "returned" in reply:
        return plain.loads(reply["returned"].encode())
    kind = getattr(builtins, reply["raised"], RuntimeError)
    # Those that are no Exception, and those that end a loop without a word, could end the tests before their end.
    is_plain = isinstance(kind, type) and issubclass(kind, Exception)
    is_plain = is_plain and not issubclass(kind, (StopIteration, StopAsyncIteration, UnicodeError))
    raise (kind if is_plain else RuntimeError)(reply["message"])


def read_line(requests: Any) -> bytes:
    """The next line of the client's; SystemExit where there is none."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (data := requests.read(READ_BYTES)):
            raise SystemExit(1)
        line += data
    return bytes(line)
