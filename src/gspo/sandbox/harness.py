"""The program inside the sandbox: it forks each run, watches it and ends it. Standard library only.

As process 1 of its namespace nothing inside can kill or stop it, and as it is not dumpable nothing can read
it. A run's program, input and output are files of the client's, which it passes on unread: no run finds
another's in the memory that it is forked with. What a run does to its own interpreter changes what that run
may say, and nothing more.
"""

import atexit
import builtins
import ctypes
import functools
import gc
import importlib
import json
import linecache
import marshal
import os
import re
import resource
import select
import signal
import socket
import stat
import sys
import time
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

import plain  # type: ignore[import-not-found]

# Imported once, before the runs are forked, which use them often.
USUAL_MODULES = "bisect collections copy datetime decimal fractions functools heapq itertools math operator"
USUAL_MODULES += " random re statistics string typing"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
TEMPORARY = ("/tmp", "/dev/shm")
NAME = "program.py"
# The numbers that a run has its files by: input and output, the program, its code, and calls of functions.
STDOUT, STDERR, PROGRAM, CODE, REQUESTS, REPLIES = 1, 2, 3, 4, 5, 6
MAX_REQUEST_BYTES = 2**16
POLL_MILLISECONDS = 20
MAX_FILES, MAX_OPEN_FILES = 10_000, 64
NAME_BYTES = 2**11  # what a name takes of a path, at most, in a buffer that is twice as large as it must be
MAX_LOOK_BYTES = 2**20
SPARE_ADDRESS_BYTES = 2**29
ENDED = 100  # the exit status of tests that ran to their end, and of a program that has answered all calls
REFUSED = (StopIteration, StopAsyncIteration, UnicodeError)
PR_SET_DUMPABLE = 4
WAIT_FOR_ALL = 0x4000_0000  # __WALL: also for children that would send no SIGCHLD
HELD = re.compile(rb"^(?:VmRSS|VmSwap|VmPTE|HugetlbPages):\s*(\d+)", re.MULTILINE)  # KiB, in a status
TICKS, PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
EVERYWHERE = os.sched_getaffinity(0)
CLEAN_LOOKS, LOOK_SECONDS = 50, 0.002
# What is read of /proc: a process chooses its name and those of its mappings, and no run may find another's.
BUFFER = bytearray(2**16)
libc = ctypes.CDLL(None)


def main() -> None:
    """Import what programs use, say so, and run what the client sends until it has gone."""
    link = socket.socket(fileno=os.dup(0))
    path, warm = json.loads(sys.argv[1])
    sys.path[:] = [*sys.path[1:], *path]  # without this program's own directory
    os.environ.clear()  # libc's copy follows
    os.environ.update(ENVIRONMENT)
    builtins.quit = builtins.exit = sys.exit  # type: ignore[assignment]  # as in an interpreter with `site`
    register, os.register_at_fork = os.register_at_fork, lambda **_: None
    import random  # seeding itself in each fork would double a fork's cost, and no verdict could be repeated

    os.register_at_fork = register
    random.seed(0)
    for name in (*USUAL_MODULES.split(), *warm):
        importlib.import_module(name)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets no signal that it does not handle
    gc.collect()
    gc.freeze()
    said, is_clean, untouched = dict[str, Any](), True, kept()
    while link.send(json.dumps(said).encode()) and is_clean:  # else the client starts another sandbox
        request, files, *_ = socket.recv_fds(link, MAX_REQUEST_BYTES, REPLIES + 1)
        if not request:
            return
        said, is_clean = run(link, json.loads(request), files), clean(untouched)


def run(link: socket.socket, header: dict[str, Any], files: list[int]) -> dict[str, Any]:
    """Fork a run and wait until it and all that it has started has ended; how, and after how many CPU seconds."""
    spent, started, statuses = children_seconds(), time.monotonic(), dict[int, int]()
    os.sched_setaffinity(0, [libc.sched_getcpu()])  # to start a run on another takes a quarter longer
    BUFFER[:] = bytes(len(BUFFER))
    pid = os.fork()
    if pid == 0:
        become(header, files)
    os.sched_setaffinity(0, EVERYWHERE)
    files.append(os.pidfd_open(pid))
    ending = watch(link, header, files, spent, started)
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, WAIT_FOR_ALL)
            statuses[ended] = status
    if not ending:
        code = os.waitstatus_to_exitcode(statuses[pid])
        is_success = code == (0 if header["mode"] in ("program", "executable") else ENDED)
        ending = "crashed" if code < 0 else "finished" if is_success else "failed"
    ending = exceeded(header["limits"], files, spent, started) or ending
    for file in files:
        os.close(file)
    return {"ending": ending, "cpu": children_seconds() - spent}


def watch(link: socket.socket, header: dict[str, Any], files: list[int], spent: float, started: float) -> str:
    """Wait until the run has ended, has answered or exceeds a limit; how it ended, where not by itself."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(files[-1], select.POLLIN)
    if header["mode"] == "functions":
        poll.register(files[REQUESTS], 0)  # its end: the tests are over
    while not (ready := dict(poll.poll(POLL_MILLISECONDS))):
        if ending := exceeded(header["limits"], files, spent, started):
            return ending
        end = os.fstat(files[REPLIES]).st_size if header["mode"] == "call" else 0
        if end and os.pread(files[REPLIES], 1, end - 1) == b"\n":
            return "finished"
    if link.fileno() in ready:  # the client has gone, or has given up this run and sends another
        sys.exit(1)
    return "" if files[-1] in ready else "finished"


def children_seconds() -> float:
    """CPU seconds of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def exceeded(limits: dict[str, Any], files: list[int], spent: float, started: float) -> str:
    """The limit that all processes of the run together exceed, or none."""
    # Of all sockets: also of those that no process has any more while what they have sent is not read.
    cpu, memory = children_seconds() - spent, num_sockets() * SOCKET_BYTES
    stored = [os.statvfs(path) for path in TEMPORARY]
    num_files = sum(place.f_files - place.f_ffree for place in stored)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if name != "1":
                size = read(f"/proc/{name}/stat")
                fields = BUFFER[BUFFER.rfind(b")", 0, size) + 1 : size].split()
                cpu += sum(map(int, fields[11:15])) / TICKS
                memory += held_by(f"/proc/{name}/task", num_files)
    memory += sum((place.f_blocks - place.f_bfree) * place.f_frsize for place in stored)
    memory += sum(os.fstat(file).st_blocks * 512 for file in files[STDOUT:])
    over = {
        "cpu_time": cpu > limits["cpu_seconds"],
        "memory": memory > limits["memory_bytes"],
        "files": num_files > MAX_FILES,
        "wall_time": time.monotonic() - started > limits["wall_seconds"],
        "output": any(os.fstat(files[n]).st_size > limits["output_bytes"] for n in (STDOUT, STDERR)),
    }
    return next((name for name in over if over[name]), "")


def held_by(threads: str, num_files: int) -> int:
    """Bytes that a process holds: pages, tables of pages and what the kernel keeps of each of its mappings.

    An open file of /proc that lists the mappings keeps a line of them, which is as long as a path of so many files.
    """
    for thread in os.listdir(threads):  # the first may have ended, and has no memory then
        if sizes := HELD.findall(BUFFER, 0, read(f"{threads}/{thread}/status")):
            held = sum(map(int, sizes)) * 1024
            try:
                return held + count_lines(f"{threads}/{thread}/maps") * PAGE_BYTES
            except PermissionError:  # it hides them: there may be as many as pages in its address space
                pages = int(BUFFER[: read(f"{threads}/{thread}/statm")].split()[0])
                return held + pages * PAGE_BYTES + MAX_OPEN_FILES * num_files * NAME_BYTES
    return 0


def read(path: str) -> int:
    """Read a short file into the buffer; its size."""
    with open(path, "rb", buffering=0) as file:
        return file.readinto(BUFFER) or 0


def count_lines(path: str) -> int:
    """The number of lines of a file; far too many where they are long, which nobody needs and which takes time."""
    number = 0
    with open(path, "rb", buffering=0) as file:
        for _ in range(MAX_LOOK_BYTES // len(BUFFER)):
            if not (size := file.readinto(BUFFER)):
                return number
            if not (lines := BUFFER.count(b"\n", 0, size)):
                break
            number += lines
    return sys.maxsize


def num_sockets() -> int:
    """The number of sockets, also of those that only other sockets hold."""
    return int(BUFFER[: read("/proc/net/sockstat")].split()[2])


# A socket takes one more message, of the size of its buffer at most, as long as those before it are smaller.
SOCKET_BYTES = 2 * int(BUFFER[: read("/proc/sys/net/core/wmem_default")])


def kept() -> list[int]:
    """Return what the kernel keeps beside processes: sockets, and blocks and files, also those without a name."""
    stored = [os.statvfs(path) for path in TEMPORARY]
    return [num_sockets(), *(number for place in stored for number in (place.f_bfree, place.f_ffree))]


def clean(untouched: list[int]) -> bool:
    """Reset what the run may have changed of the places for its files; whether nothing of it is left."""
    for place in TEMPORARY:
        os.chmod(place, stat.S_IRWXU)
    if any(map(os.listdir, TEMPORARY)):
        return False
    for place in TEMPORARY:
        os.utime(place, (0, 0))
    for _ in range(CLEAN_LOOKS):
        if kept() == untouched:
            return True
        for end in socket.socketpair():  # which has the kernel give up sockets that only hold each other
            end.close()
        time.sleep(LOOK_SECONDS)
    return False


# In the fork


def become(header: dict[str, Any], files: list[int]) -> NoReturn:
    """Become a run: take its files and limits, and run its program to the end."""
    try:
        os.sched_setaffinity(0, EVERYWHERE)
        os.setsid()
        set_limits(header["limits"])
        for number, file in enumerate(files):  # each has a higher number than its place
            os.dup2(file, number, inheritable=number <= STDERR)
        os.closerange(len(files), 2**20)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        if header["mode"] == "executable":
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execv(f"/proc/self/fd/{PROGRAM}", [NAME])
        run_python(header)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def set_limits(limits: dict[str, Any]) -> None:
    """Set the kernel's limits: for each process what the harness, which counts all, may see too late."""
    for name, value in (
        ("AS", 2 * limits["memory_bytes"] + SPARE_ADDRESS_BYTES),
        ("NPROC", limits["processes"] + 1),  # the harness
        ("SIGPENDING", 2**10),  # signals that are queued, and timers
        *(("NOFILE", MAX_OPEN_FILES), ("FSIZE", 2**27), ("STACK", 2**28), ("CORE", 0)),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        highest = resource.getrlimit(kind)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(kind, (value, highest if name == "STACK" else value))  # programs raise it


def run_python(header: dict[str, Any]) -> NoReturn:
    """Run the program as the main module, as the interpreter would; then answer calls of its functions."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    sys.argv = [NAME]
    status = 0
    try:
        with open(PROGRAM, "rb") as file:
            source = file.read().decode(errors="surrogatepass")
        linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
        code = compiled(source)
        if header["mode"] == "tests":
            replies = open(REQUESTS, "rb")  # noqa: SIM115 - until the run's end
            hear(replies)  # that the program is ready
            for name in header["functions"]:
                setattr(main, name, functools.partial(ask, replies, name))
        exec(code, main.__dict__)
        if header["mode"] == "functions":
            say(b"ready", ENDED)
        if header["mode"] in ("call", "functions"):
            answer(main.__dict__)
        if header["mode"] != "program":
            os._exit(ENDED)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        status = 1
    try:
        if threading := sys.modules.get("threading"):  # importing it would double what a fork costs
            threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except BaseException:
        status = status or 120  # as the interpreter has it
    os._exit(status & 0xFF)


def compiled(source: str) -> types.CodeType:
    """The program's code: what its first run has kept, which no program's own code can reach, or compiled."""
    try:
        with suppress(EOFError, ValueError, TypeError):  # there is none, or its writer was ended in the midst
            return marshal.loads(os.pread(CODE, os.fstat(CODE).st_size, 0))
        code = compile(source, NAME, "exec", dont_inherit=True)
        os.pwrite(CODE, marshal.dumps(code), 0)
        return code
    finally:
        os.close(CODE)


def answer(names: dict[str, Any]) -> None:
    """Answer calls of the program's functions until there are no more."""
    for line in open(REQUESTS, "rb"):  # noqa: SIM115
        name, arguments, keywords = plain.loads(line)
        try:
            function = names[name] if name in names else getattr(names["Solution"](), name)
            reply = {"returned": plain.dumps(function(*arguments, **keywords)).decode()}
        except BaseException as error:
            place = error.__traceback__ and error.__traceback__.tb_next
            text = "".join(traceback.format_exception(type(error), error, place))
            reply = {"raised": type(error).__name__, "text": text[-1000:], "message": str(error)[:1000]}
        sys.stdout.flush()
        say(json.dumps(reply).encode(), ENDED)


def ask(replies: Any, name: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of the program's, which runs in another sandbox; what it returns or raises."""
    say(plain.dumps((name, arguments, keywords)), 1)
    line = hear(replies)
    kind, message = RuntimeError, "no message"
    with suppress(Exception):  # a program has written it
        reply = json.loads(line)
        if "returned" in reply:
            return plain.loads(reply["returned"])
        message, raised = str(reply["message"]), getattr(builtins, reply["raised"])
        # What is no Exception, or ends a loop without a word, could end the tests before their end.
        if issubclass(raised, Exception) and not issubclass(raised, REFUSED):
            kind = raised
    raise kind(message)


def hear(replies: Any) -> bytes:
    """The next line of the program's; end where that has gone, or says what is no line."""
    line = replies.readline(2 * plain.MAX_BYTES)
    return line if line.endswith(b"\n") else os._exit(1)


def say(message: bytes, status: int) -> None:
    """Write a message to the other side of the calls, as one line; end with this status where that has gone."""
    line = memoryview(message + b"\n")
    try:
        while line:
            line = line[os.write(REPLIES, line) :]
    except BrokenPipeError:
        os._exit(status)


if __name__ == "__main__":
    main()
