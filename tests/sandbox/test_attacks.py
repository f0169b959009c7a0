"""What a program may try: each attack fails, earns nothing, and leaves the sandbox as it was for the next program."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from tests.needs import needs

from gspo.sandbox.sandbox import Limits, Ran, Sandbox, Server, ServerDiedError

pytestmark = needs("sandbox")
SMALL = Limits(cpu_seconds=2, wall_seconds=20, memory_bytes=2**28, output_bytes=2**16, processes=8)
BRIEF = Limits(cpu_seconds=0.2, wall_seconds=20)
# What the tests expect, and how an attack recognizes it: the digits are in no program.
SECRET = f"expected{secrets.randbelow(10**12):012}"
SEARCH = """
import re
pattern = re.compile(b"expec" + b"ted([0-9]{12})")
def search(data):
    match = pattern.search(data)
    return match and "expected" + match[1].decode()
def search_memory(pid):
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if "r" in line.split()[1] and end - start < 2**26 and "[v" not in line:
                memory.seek(start)
                try:
                    if result := search(memory.read(end - start)):
                        return result
                except OSError:
                    pass
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    with Sandbox(packages=()) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared: Sandbox) -> Iterator[Sandbox]:
    """A sandbox in which an honest program gets its due after each attack, and finds nothing of it."""
    yield shared
    honest = (
        "import os\nprint(int(input()) + 1, os.listdir('/tmp'), os.listdir('/dev/shm'), os.listdir('/proc/self/fd'))"
    )
    processes = (
        "parent = os.getppid()\n"
        "own = 1, os.getpid(), parent, int(open(f'/proc/{parent}/stat').read().split()[3])\n"
        "print([name for name in os.listdir('/proc') if name.isdigit() and int(name) not in own])"
    )
    ran = shared.run(f"{honest}\n{processes}", b"41", SMALL)
    assert (ran.ending, ran.output) == ("finished", b"42 [] [] ['0', '1', '2', '3']\n[]\n"), ran.error


def fails(sandbox: Sandbox, source: str, limits: Limits = SMALL) -> Ran:
    """What came of tests that want the secret from f, which the source tries to find: never success."""
    ran = sandbox.check(f"{SEARCH}\n{source}", f"assert f() == {SECRET!r}", ["f"], limits)
    assert ran.ending != "finished"
    return ran


def refused(sandbox: Sandbox, *attempts: str, setup: str = "") -> None:
    """Each attempt raises OSError."""
    source = f"import os, socket, ctypes\n{setup}\n"
    for attempt in attempts:
        source += f"try:\n    {attempt}\nexcept OSError: print('refused')\nelse: print('done')\n"
    ran = sandbox.run(source, limits=SMALL)
    assert ran.output.decode().split() == ["refused"] * len(attempts), (ran, attempts)


# Reading what the tests expect


def test_reading_its_own_memory(sandbox: Sandbox) -> None:
    control = sandbox.call(f"{SEARCH}\ndef f(text): return search_memory('self')", "f", [SECRET], SMALL)
    assert control.value == SECRET  # the search works where there is something to see
    fails(sandbox, "def f(): return search_memory('self')")


def test_reading_what_earlier_runs_were_given_and_said(sandbox: Sandbox) -> None:
    source = f"{SEARCH}\nlines = open(0).read()\nprint(search_memory('self') or 'nothing')\nprint(lines)"
    assert sandbox.run(source, f"{SECRET}\n".encode() * 100, SMALL).output.startswith(SECRET.encode())
    for text in (source, source + "\n"):  # another run of that program, and another program
        assert sandbox.run(text, limits=SMALL).output == b"nothing\n\n"


def test_reading_memory_of_others(sandbox: Sandbox) -> None:
    source = """
import os
def f():
    read = []
    for pid in [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
        for name in ("mem", "environ", "maps", "fd/0", "root", "cwd"):
            try:
                os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
                read.append(f"{pid}/{name}")
            except OSError:
                pass
    return str(read)
"""
    fails(sandbox, source)
    assert sandbox.call(source, "f", [], SMALL).value == "[]"


def test_reading_objects_and_frames(sandbox: Sandbox) -> None:
    fails(
        sandbox,
        """
import gc, sys
def f():
    frame, seen = sys._getframe(), []
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    return search("".join([*seen, *map(repr, gc.get_objects())]).encode())
""",
    )


def test_reading_files(sandbox: Sandbox, tmp_path: Path) -> None:
    hidden = tmp_path / "answers.txt"
    hidden.write_text(SECRET)
    fails(
        sandbox,
        f"""
import os
def f():
    for top in ("{tmp_path}", "/tmp", "/dev", "/etc", "/home", "/root", "/sandbox", "/proc/1", "/proc/self"):
        for folder, _, names in os.walk(top):
            for name in names:
                try:
                    number = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
                    if found := search(os.read(number, 2**16)): return found
                except OSError:
                    pass
""",
    )
    refused(sandbox, f"open({str(hidden)!r})", "open('/etc/passwd')", f"open({__file__!r})", "os.listdir('/home')")


def test_reading_the_environment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSWER", SECRET)
    with Sandbox(packages=()) as fresh:
        ran = fresh.run("import os\nprint(dict(os.environ), open('/proc/self/environ').read())", limits=SMALL)
    assert ran.ending == "finished" and SECRET.encode() not in ran.output and b"ANSWER" not in ran.output
    refused(sandbox, "open('/proc/1/environ')")


# Reaching out


def test_writing_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    places = [
        "/x",
        "/usr/x",
        "/dev/x",
        "/sandbox/harness.py",
        "/proc/sys/kernel/hostname",
        "/proc/sys/net/core/somaxconn",
    ]
    places += [
        "/proc/1/oom_score_adj",
        "/proc/sysrq-trigger",
        f"{tmp_path}/x",
        os.__file__,
        os.path.realpath(sys.executable),
    ]
    refused(sandbox, *(f"open({place!r}, 'w')" for place in places))
    name = f"outside{secrets.token_hex(8)}"
    assert sandbox.run(f"open('/tmp/{name}', 'w')").ending == "finished"
    assert not Path(f"/tmp/{name}").exists()


def test_network(sandbox: Sandbox, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        refused(
            sandbox, connect, "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "socket.socket(socket.AF_NETLINK)"
        )
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("is_abstract", [False, True])
def test_sockets_of_the_host(sandbox: Sandbox, tmp_path: Path, is_abstract: bool) -> None:
    address = f"\0{secrets.token_hex(8)}" if is_abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        refused(sandbox, f"socket.socket(socket.AF_UNIX).connect({address!r})")


SYSTEM_CALLS = """
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if function(*arguments) == -1: raise OSError(ctypes.get_errno())
def number(value, *arguments): call(libc.syscall, value, *arguments)
"""


def test_ptrace(sandbox: Sandbox) -> None:
    child = "child = os.fork()\nif not child: os.pause() if hasattr(os, 'pause') else __import__('signal').pause()"
    attempts = ["call(libc.ptrace, 16, child, 0, 0)", "call(libc.ptrace, 16, 1, 0, 0)", "call(libc.ptrace, 0, 0, 0, 0)"]
    attempts += [
        "call(libc.process_vm_readv, child, None, 0, None, 0, 0)",
        "call(libc.pidfd_getfd, os.pidfd_open(1), 0, 0)",
    ]
    attempts += ["number(438, os.pidfd_open(1), 0, 0)"]
    setup = SYSTEM_CALLS + child + "\nif not hasattr(libc, 'pidfd_getfd'): libc.pidfd_getfd = lambda *_: -1"
    refused(sandbox, *attempts, setup=setup)


def test_memory_that_no_limit_counts(sandbox: Sandbox) -> None:
    attempts = ["os.memfd_create('x')", "call(libc.shmget, 0, 4096, 0o1600)", "call(libc.msgget, 0, 0o1600)"]
    attempts += [
        "number(447, 0)",
        "os.setxattr('/tmp', 'user.x', b'x')",
        "number(250, 0, 0, 0, 0)",
    ]  # memfd_secret, keyctl
    refused(sandbox, *attempts, setup=SYSTEM_CALLS)


def test_memory_in_the_kernel_that_no_limit_counts(sandbox: Sandbox) -> None:
    buffers = ("socket.SO_SNDBUF", "socket.SO_RCVBUF", "32", "33", "26")  # …BUFFORCE, a filter
    attempts = [f"pair[0].setsockopt(socket.SOL_SOCKET, {name}, 2**20)" for name in buffers]
    attempts += ["fcntl.fcntl(pipe[1], 1031, 2**20)"]  # F_SETPIPE_SZ
    attempts += [f"number(72, pipe[1], {2**32 + 1031}, {2**20})"]
    attempts += [f"fcntl.fcntl(file, {command}, lock)" for command in (fcntl.F_SETLK, fcntl.F_SETLKW, 37, 38)]
    attempts += ["fcntl.fcntl(folder, 1026, 1)", "fcntl.fcntl(file, 1024, 0)"]  # a notice, a lease
    attempts += ["select.epoll()", "number(213, 1)", "os.sendfile(pair[0].fileno(), file, 0, 1)"]
    attempts += ["number(275, pipe[0], None, pair[0].fileno(), None, 1, 0)", "number(276, pipe[0], pipe[1], 1, 0)"]
    attempts += ["mmap.mmap(-1, 4096)", "mmap.mmap(-1, 4096, flags=0x23)", "os.open('/dev/zero', os.O_RDONLY)"]
    attempts += ["number(294, 0)", "number(206, 1, bytes(8))", "number(240, b'x', 66, 384, None)", "number(323, 0)"]
    setup = f"{SYSTEM_CALLS}\nimport fcntl, mmap, select, struct\npair, pipe = socket.socketpair(), os.pipe()\n"
    setup += "file, folder = os.open('/tmp/x', os.O_CREAT | os.O_RDWR), os.open('/tmp', 0)\nos.write(file, b'x')\n"
    refused(sandbox, *attempts, setup=setup + "lock = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 1, 0)")


HOLDING = {
    "sockets": """
kept = [os.fork() for _ in range(3)]
while len(kept) < 33:
    kept += [socket.socketpair(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
    for end in (*kept[-2], *kept[-1]):
        end.setblocking(False)
        with suppress(OSError):
            while True: end.send(bytes(30_000))
""",
    "sockets that wait to be accepted": """
listener = socket.socket(socket.AF_UNIX)
listener.bind("/tmp/x")
listener.listen(4096)
while True:
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.setblocking(False)
        client.connect("/tmp/x")
        while True: client.send(bytes(30_000))
""",
    "messages of sockets that are closed": """
kept = []
for number in range(50):
    kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    kept[-1].bind(f"/tmp/{number}")
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client, suppress(OSError):
            client.setblocking(False)
            client.sendto(bytes(200_000), f"/tmp/{number}")
""",
    "sockets on their way to a process": """
carrier = socket.socketpair()
kept = [os.fork() for _ in range(3)]
while len(kept) < 23:
    pair = socket.socketpair()
    kept.append(pair)
    for end in pair:
        end.setblocking(False)
        with suppress(OSError):
            while True: end.send(bytes(30_000))
    with suppress(OSError):
        socket.send_fds(carrier[0], [b"x"], [end.fileno() for end in pair])
""",
    "tables of pages": "for number in range(1, 40_000): read(mapped(number << 30))",
    "mappings": "for number in range(60_000): mapped(2**40 + number * 8192)",
    "mappings that are hidden": "libc.prctl(4, 0, 0, 0, 0)\nfor number in range(60_000): mapped(2**40 + number * 8192)",
    "output beyond its end": "for file in (1, 2): libc.fallocate(file, 1, ctypes.c_long(0), ctypes.c_long(2**27))",
    "memory of a process whose first thread has ended": """
import threading
def keep():
    while open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z": time.sleep(0.001)
    kept = b"x" * 2**27
    time.sleep(100)
threading.Thread(target=keep).start()
libc.syscall(60, 0)
""",
}
MAPPING = """
import ctypes, os, socket, time
from contextlib import suppress
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 6
def mapped(at): return libc.mmap(at, 4096, 1, 0x100022, 2**64 - 1, 0)  # private, of no file, exactly there
def read(at): return None if at == 2**64 - 1 else ctypes.c_char.from_address(at).value
"""


@pytest.mark.parametrize("source", HOLDING.values(), ids=HOLDING)
def test_memory_that_is_in_no_process(sandbox: Sandbox, source: str) -> None:
    waiting = f"{MAPPING}{source}\nprint('all', flush=True)\ntime.sleep(100)"
    ran = sandbox.run(waiting, limits=replace(SMALL, memory_bytes=2**27))
    assert ran.ending == "memory", ran


def test_no_memory_is_of_huge_pages(sandbox: Sandbox) -> None:
    """Of one that is given back in part the kernel may keep all, which then no process is charged for."""
    source = "for flag in (0, 2): libc.prctl(41, flag and 1, flag, 0, 0)\n"
    source += "at = libc.mmap(0, 2**23, 3, 0x22, 2**64 - 1, 0)\nlibc.madvise(ctypes.c_void_p(at), 2**23, 14)\n"
    source += "ctypes.memset(at, 1, 2**23)\nlibc.madvise(ctypes.c_void_p(at), 2**23, 25)\n"
    show = "print(*[line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('AnonHugePages')])"
    assert sandbox.run(f"{MAPPING}{source}{show}", limits=SMALL).output == b"0\n"


def test_files_that_the_client_has_written_do_not_change(sandbox: Sandbox) -> None:
    attempts = ["os.write(file, b'x')", "os.ftruncate(file, 2**20)", "os.ftruncate(file, 1)"]
    attempts += ["os.posix_fallocate(file, 0, 2**20)", "fcntl.fcntl(file, 1033, 0)"]  # F_ADD_SEALS
    source = "import fcntl, os\ndef f():\n    done = []\n    for place in (0, 5):  # its input, its arguments\n"
    source += "        for file in (place, os.open(f'/proc/self/fd/{place}', os.O_RDWR)):\n"
    for attempt in attempts:
        source += f"            try: done.append({attempt} or {attempt!r})\n            except OSError: pass\n"
    assert sandbox.call(f"{source}    return done", "f", [], SMALL).value == []


@pytest.mark.parametrize("write", ["os.ftruncate(1, 2**26)", "os.pwrite(2, b'x', 2**26)"])
def test_output_with_a_gap(sandbox: Sandbox, write: str) -> None:
    ran = sandbox.run(f"import os\n{write}", limits=SMALL)
    assert ran.ending == "output" and len(ran.output) <= SMALL.output_bytes


def test_an_answer_that_a_run_goes_on_after(sandbox: Sandbox) -> None:
    """The first line counts, and a run that lingers is ended, whoever holds its pipes."""
    source = 'import json, os, time\ndef f():\n    os.write(6, b\'{"returned": "1"}\\n\')\n'
    for more in ("time.sleep(1000)", 'os.write(6, b\'{"returned": "2"}\\n\'); time.sleep(1000)', "return 2"):
        started = time.monotonic()
        assert sandbox.call(f"{source}    {more}", "f", [], SMALL).value == 1
        assert sandbox.check(f"{source}    {more}", "assert f() == 1", ["f"], SMALL).ending == "finished"
        assert sandbox.check(f"{source}    {more}", "assert f() == 2", ["f"], SMALL).ending == "failed"
        assert time.monotonic() - started < SMALL.wall
    for _ in range(50):  # what it says when nobody reads any more changes nothing, whoever is first
        assert sandbox.check(f"{source}    return 2", "assert f() == 1", ["f"], SMALL).ending == "finished"
    holding = "import os\nkept = os.open('/proc/self/fd/5', os.O_WRONLY)\ndef f(): return 1"
    brief = replace(SMALL, wall_seconds=1)
    assert sandbox.check(holding, "assert f() == 1", ["f"], brief).ending in ("wall_time", "failed")  # root's pipe


@pytest.mark.parametrize("early", ["os._exit(0)", "os._exit(100)", "os.kill(os.getpid(), 9)"])
def test_tests_that_take_the_end_of_a_program_for_an_exception(sandbox: Sandbox, early: str) -> None:
    tests = "try: f()\nexcept BaseException: pass"
    assert sandbox.check(f"import os\ndef f(): {early}", tests, ["f"], SMALL).ending != "finished"
    assert sandbox.check("def f(): raise ValueError", tests, ["f"], SMALL).ending == "finished"


def test_a_file_that_only_sockets_hold(sandbox: Sandbox) -> None:
    """Sockets that are on their way over each other, with a file that has no name, are gone for the next run."""
    source = """
import os, socket
def leave():
    file = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.write(file, bytes(2**24))
    one, other = socket.socketpair()
    socket.send_fds(one, [b"x"], [other.fileno(), file])
    socket.send_fds(other, [b"x"], [one.fileno()])
for _ in range(3): leave()
"""
    for _ in range(8):
        assert sandbox.run(source, limits=SMALL).ending == "finished"
        ran = sandbox.run("import os\nplace = os.statvfs('/tmp')\nprint(place.f_blocks - place.f_bfree)", limits=SMALL)
        assert ran.output == b"0\n", ran


def test_no_run_finds_names_that_another_chose(sandbox: Sandbox) -> None:
    """Those of processes, threads and mapped files, which are read while the run is measured."""
    source = f"""
import ctypes, mmap, os, threading, time
name = "trace{secrets.randbelow(10**9):09}"
def call(): ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0), time.sleep(0.3)
with open("/tmp/" + name, "wb+") as file:
    file.write(bytes(4096))
    file.flush()
    kept = mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE)
threads = [threading.Thread(target=call) for _ in range(4)]
for thread in threads: thread.start()
call()
os.unlink("/tmp/" + name)
"""
    search = SEARCH.replace('b"expec" + b"ted([0-9]{12})"', 'b"tra" + b"ce([0-9]{9})"').replace("expected", "found")
    assert sandbox.run(f"{source}{search}print(search_memory(os.getpid()))", limits=SMALL).output[:5] == b"found"
    for _ in range(3):
        assert sandbox.run(source, limits=SMALL).ending == "finished"
        ran = sandbox.run(f"import os\n{search}print(search_memory(os.getpid()))", limits=SMALL)
        assert ran.output == b"None\n", ran


DEEP = """
os.chdir("/tmp")
for _ in range(4000):
    os.mkdir("d" * 255)
    os.chdir("d" * 255)
file = os.open("f", os.O_CREAT | os.O_RDWR)
os.write(file, bytes(4096))
for _ in range(500): libc.mmap(0, 8192, 1, 2, file, 0), libc.mmap(0, 4096, 0, 0x22, 2**64 - 1, 0)
"""
OPENED = """
kept = [open("/proc/self/maps", "rb", buffering=0) for _ in range(50)]
for file in kept:
    while b"d" * 1000 not in file.read(2**16): pass
"""


@pytest.mark.parametrize("hide", ["", "libc.prctl(4, 0, 0, 0, 0)\n"])
@pytest.mark.parametrize("then", ["while True: pass", f"{OPENED}time.sleep(100)"])
def test_long_paths_in_proc(sandbox: Sandbox, hide: str, then: str) -> None:
    """Such a path takes time to read for whoever measures, and memory in each open file that lists mappings."""
    started = time.monotonic()
    ran = sandbox.run(f"{MAPPING}{hide}{DEEP}{then}", limits=SMALL)
    assert ran.ending in ("memory", "cpu_time") and ran.cpu_seconds < 3 and time.monotonic() - started < 15


def test_locks_of_shared_files(sandbox: Sandbox) -> None:
    refused(sandbox, "fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)", setup="import fcntl")


@pytest.mark.parametrize("kind", ["rt_sigqueueinfo", "timer_create"])
def test_signals_and_timers_are_few(sandbox: Sandbox, kind: str) -> None:
    make = {
        "rt_sigqueueinfo": "libc.sigqueue(os.getpid(), 40, None)",
        "timer_create": "libc.syscall(222, 1, None, number)",
    }
    source = (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [14, 40])\nnumber, n = ctypes.c_char_p(bytes(8)), 0"
    )
    ran = sandbox.run(f"{MAPPING}{source}\nwhile {make[kind]} == 0: n += 1\nprint(n)", limits=SMALL)
    assert 0 < int(ran.output) <= 1024


def test_nested_namespaces(sandbox: Sandbox) -> None:
    attempts = [f"call(libc.unshare, {flag})" for flag in (0x10000000, 0x20000, 0x40000000)]
    attempts += ["number(56, 0x10000011, 0, 0, 0, 0)", "number(435, 0, 0)"]  # clone(CLONE_NEWUSER), clone3
    attempts += ["call(libc.setns, os.open('/proc/self/ns/user', os.O_RDONLY), 0)"]
    refused(sandbox, *attempts, setup=SYSTEM_CALLS)


def test_mount(sandbox: Sandbox) -> None:
    attempts = ["call(libc.mount, b'none', b'/tmp', b'tmpfs', 0, None)", "call(libc.umount2, b'/proc', 2)"]
    attempts += ["os.chroot('/tmp')", "call(libc.pivot_root, b'/tmp', b'/tmp')", "number(428, -100, b'/', 1)"]
    attempts += ["number(321, 0, 0, 0)", "number(425, 1, 0)", "number(298, 0, 0, -1, -1, 0)"]  # bpf, io_uring, perf
    refused(sandbox, *attempts, setup=SYSTEM_CALLS)


# Using up the machine


def test_fork_bomb(sandbox: Sandbox) -> None:
    ran = sandbox.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=SMALL)
    assert ran.ending == "cpu_time"


def test_processes_that_nobody_waits_for(sandbox: Sandbox) -> None:
    """Each hands the rest of the work on to a child, and ends: what it has used counts with the run's."""
    adopt = "import ctypes, os, time\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
    source = f"{adopt}for _ in range(20):\n    if os.fork(): os._exit(0)\n    while time.process_time() < 0.05: pass\n"
    ran = sandbox.run(f"{adopt}if os.fork(): time.sleep(5), os._exit(0)\n{source}", limits=BRIEF)
    assert ran.ending == "cpu_time" and ran.cpu_seconds < 0.6, ran


def test_the_time_of_children_cannot_be_hidden(sandbox: Sandbox) -> None:
    attempts = ["signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "number(13, 17, bytes(32), None, 8)"]
    attempts += [f"number(13, {2**32 + 17}, bytes(32), None, 8)"]
    refused(sandbox, *attempts, setup=f"import signal\n{SYSTEM_CALLS}")


def test_memory(sandbox: Sandbox) -> None:
    ran = sandbox.run("kept = []\nwhile True: kept.append(bytearray(2**22))", limits=SMALL)
    assert ran.ending in ("memory", "failed")


def test_memory_of_many_processes(sandbox: Sandbox) -> None:
    source = "import os, time\nfor _ in range(5):\n    if not os.fork(): break\nkept = b'x' * 2**26\ntime.sleep(100)"
    assert sandbox.run(source, limits=SMALL).ending == "memory"


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_disk(sandbox: Sandbox, place: str) -> None:
    source = f"with open('{place}/x', 'wb', buffering=0) as file:\n    while True: file.write(bytes(2**20))"
    ran = sandbox.run(source, limits=SMALL)
    assert ran.ending == "failed" and "No space left" in ran.error


def test_files_count_as_memory(sandbox: Sandbox) -> None:
    source = "import time\nopen('/dev/shm/x', 'wb').write(bytes(2**24))\ntime.sleep(100)"
    assert sandbox.run(source, limits=Limits(memory_bytes=2**24, wall_seconds=20)).ending == "memory"


def test_many_files(sandbox: Sandbox) -> None:
    source = "import os\nos.chdir('/dev/shm')\nfor number in range(10**9): os.mkdir('d'); os.chdir('d')"
    assert sandbox.run(source, limits=SMALL).ending == "files"


def test_file_descriptors(sandbox: Sandbox) -> None:
    ran = sandbox.run("import os\nkept = []\nwhile True: kept.append(os.pipe())", limits=SMALL)
    assert ran.ending == "failed" and "Too many open files" in ran.error


@pytest.mark.parametrize("number", [1, 2])
def test_output_without_end(sandbox: Sandbox, number: int) -> None:
    ran = sandbox.run(f"import os\nwhile True: os.write({number}, bytes(2**16))", limits=SMALL)
    assert ran.ending == "output" and len(ran.output) <= SMALL.output_bytes


def test_an_answer_without_end(sandbox: Sandbox) -> None:
    source = "import os\nfor number in range(3, 64):\n    try:\n        while True: os.write(number, bytes(2**16))\n"
    ran = sandbox.call(source + "    except OSError: pass\ndef f(): return 'x' * 2**25", "f", [], SMALL)
    assert ran.ending not in ("finished",) and ran.value is None


def test_sleeping_for_ever(sandbox: Sandbox) -> None:
    ran = sandbox.run("import time\ntime.sleep(1000)", limits=Limits(wall_seconds=0.3))
    assert ran.ending == "wall_time"


@pytest.mark.parametrize("source", ["while True: pass", "10 ** 10 ** 8", "import re\nre.match('(a*)*b', 'a' * 99)"])
def test_a_loop_without_end(sandbox: Sandbox, source: str) -> None:
    assert sandbox.run(source, limits=BRIEF).ending == "cpu_time"


def test_deep_recursion(sandbox: Sandbox) -> None:
    source = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return sorted([x], key=f)\nf(1)"
    assert sandbox.run(source, limits=SMALL).ending in ("crashed", "failed", "memory")
    deep = "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and f(n - 1) + 1\nprint(f(50000))"
    assert sandbox.run(deep).output == b"50000\n"  # which honest programs may want


# Cheating


@pytest.mark.parametrize("name", ["print", "open", "input", "isinstance", "len", "exec", "getattr", "type"])
def test_patched_builtins(sandbox: Sandbox, name: str) -> None:
    fails(sandbox, f"import builtins\nbuiltins.{name} = lambda *_, **__: True\ndef f(): return 1")


def test_patched_json_and_channel(sandbox: Sandbox) -> None:
    source = """
import json, sys
json.dumps = lambda *_, **__: '{"ended": true}'
sys.modules["plain"].dumps = lambda _: b"true"
spaces, frame = [vars(module) for module in list(sys.modules.values())], sys._getframe()
while frame:
    spaces.append(frame.f_globals)
    frame = frame.f_back
for space in spaces:
    for name in ("say", "ask", "answer"):
        if name in space:
            space[name] = lambda *_, **__: None
def f(): return 1
"""
    fails(sandbox, source)


@pytest.mark.parametrize(
    "exit_", ["sys.exit(0)", "os._exit(0)", "raise SystemExit", "os.kill(os.getpid(), 9)", "quit()"]
)
def test_ending_before_the_tests(sandbox: Sandbox, exit_: str) -> None:
    early = f"import os, sys\n{exit_}\ndef f(): return 1"
    fails(sandbox, early)
    fails(sandbox, f"import os, sys\ndef f(): {exit_}")
    assert sandbox.call(early, "f", [], SMALL).ending != "finished"


@pytest.mark.parametrize("kind", ["StopIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt", "BaseException"])
def test_exceptions_that_end_the_tests_early(sandbox: Sandbox, kind: str) -> None:
    tests = f"assert all(value == {SECRET!r} for value in map(f, [1, 2]))"
    assert sandbox.check(f"def f(x): raise {kind}", tests, ["f"], SMALL).ending == "failed"
    assert sandbox.check(f"def f(x): raise {kind}", "assert all(map(f, [1, 2]))", ["f"], SMALL).ending == "failed"


def test_atexit(sandbox: Sandbox) -> None:
    source = "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(): return 1"
    fails(sandbox, source)
    assert sandbox.run(f"{source}\n1 / 0", limits=SMALL).output == b""


def test_an_overwritten_comparison(sandbox: Sandbox) -> None:
    source = """
import ctypes, operator
operator.eq = lambda *_: True
class Same(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
    __class__ = str
def f(): return Same("x")
"""
    fails(sandbox, source)
    assert sandbox.call(source, "f", [], SMALL).ending == "failed"


@pytest.mark.parametrize("base", ["object", "int", "str", "list", "dict", "float", "tuple"])
def test_an_object_that_equals_everything(sandbox: Sandbox, base: str) -> None:
    source = f"class Same({base}):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    source += "def f(): return Same()\ndef g(): return [Same()]"
    fails(sandbox, source)
    for name in "fg":
        ran = sandbox.call(source, name, [], SMALL)
        assert (ran.ending, ran.value) == ("failed", None)


def test_guessing_the_channel(sandbox: Sandbox) -> None:
    lines = [json.dumps(line) for line in ({"ended": True}, {"ready": True}, {"returned": '"x"'}, {"done": 1})]
    source = f"""
import os
def f():
    for number in range(64):
        for line in {lines!r}:
            try: os.write(number, line.encode() + b"\\n")
            except OSError: pass
f()
"""
    fails(sandbox, source)
    frame = b"\x20\0\0\0\0\0\0\0" + b'{"ended": "finished", "cpu": 0.0}'
    ran = sandbox.run(
        f"import os\nfor n in range(64):\n    try: os.write(n, {frame!r})\n    except OSError: pass\n1 / 0"
    )
    assert ran.ending == "failed"


def forging(line: str) -> str:
    """A program that writes a line wherever it can, so that its true answer is one too many."""
    return f"""
import os
def f():
    for number in range(3, 64):
        try: os.write(number, {line!r}.encode() + b"\\n")
        except OSError: pass
"""


def test_a_forged_answer_is_plain_data(sandbox: Sandbox) -> None:
    colliding = json.dumps({"set": [{"int": hex(i * (2**61 - 1))} for i in range(1000)]})
    too_large = json.dumps({"complex": [10**400, 0]})
    for text in (
        "[" * 9999,
        colliding,
        too_large,
        '{"complex": ["x", 0]}',
        "\ud800",
        "1" * 5000,
        '{"object": []}',
        '{"set": [[]]}',
        "NaN!",
        '{"int": "x"}',
        "[" * 70 + "]" * 70,
    ):
        ran = sandbox.call(forging(json.dumps({"returned": text})), "f", [], SMALL)
        assert (ran.ending, ran.value) == ("failed", None), text[:20]
    for line in (
        '{"returned": [[]]}',
        '{"raised": {}, "text": 7}',
        '{"raised": "\\ud800"}',
        "[" * 900 + "]" * 900,
        "\0",
    ):
        assert sandbox.call(forging(line), "f", [], SMALL).ending == "failed"
        assert sandbox.check(forging(line), "f()", ["f"], SMALL).ending == "failed"


def test_what_a_server_says_before_its_end_counts(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Server.send

    def send_late(self: Server, *arguments: Any, **header: Any) -> None:
        if "stop" in header:
            self._process.wait(20)  # an answer too many has ended it
        send(self, *arguments, **header)

    monkeypatch.setattr(Server, "send", send_late)
    assert sandbox.call(forging("{}"), "f", [], SMALL).ending == "failed"


# What its client gives up

LURKING = """
import os, select, time
def f():  # answers whatever comes next, and is never done
    while True:
        for number in range(3, 9):
            try: os.read(number, 2**16) if select.select([number], [], [], 0)[0] else None
            except OSError: pass
            for line in (b'{"ready": true}', b'{"returned": "2"}', b'{"ended": true}'):
                try: os.write(number, line + b"\\n")
                except OSError: pass
        time.sleep(0.001)
f()
"""
OPERATIONS: dict[str, Callable[[Sandbox, str], Ran]] = {
    "run": lambda sandbox, source: sandbox.run(f"{source}\nprint(f())", limits=SMALL),
    "call": lambda sandbox, source: sandbox.call(source, "f", [], SMALL),
    "check": lambda sandbox, source: sandbox.check(source, "assert f() == 2", ["f"], SMALL),
}


class GivenUpError(BaseException):
    """An exception that nothing of the sandbox's can know."""


def interrupted(action: Callable[[], object], after: int) -> bool:
    """Whether the action was interrupted: an exception comes at this line of the sandbox's, counted as they run."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "/gspo/sandbox/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        if count == after and event == "line":
            raise GivenUpError
        return trace

    sys.settrace(trace)
    try:
        action()
        return False
    except GivenUpError:
        return True
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("name", OPERATIONS)
def test_after_an_exception_at_any_point_no_program_meets_another(sandbox: Sandbox, name: str) -> None:
    operation, after = OPERATIONS[name], 1
    lasting = "import time\ntime.sleep(0.05)\ndef f(): return 2"
    while interrupted(lambda: operation(sandbox, lasting), after):
        for other in OPERATIONS.values():
            assert other(sandbox, "def g(: return 2").ending == "failed"
            assert other(sandbox, "def f(): return 2").ending == "finished"
        after += 37


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_program_that_lurks_does_not_answer_for_another(
    sandbox: Sandbox, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Server.receive

    def give_up(self: Server, *arguments: Any) -> Any:
        raise GivenUpError

    monkeypatch.setattr(Server, "receive", give_up)
    with pytest.raises(GivenUpError):
        sandbox.call(LURKING, "f", [], SMALL)
    monkeypatch.setattr(Server, "receive", receive)
    assert OPERATIONS[name](sandbox, "def g(: return 2").ending == "failed"
    assert OPERATIONS[name](sandbox, "def f(): return 2").ending == "finished"


@pytest.mark.parametrize("header", [{"mode": "functions"}, {}, {"limits": {}}])
def test_a_server_that_gets_a_request_in_a_run_ends_itself(header: dict[str, Any]) -> None:
    server, deadline = Server((), ()), time.monotonic() + 20
    limits = {**vars(SMALL), "wall_seconds": 100}
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(5)]
        files[3].write(b"import time\ntime.sleep(1000)")
        files[3].seek(0)
        server.send({"mode": "program", "limits": limits}, [file.fileno() for file in files])
        server.send(header, [])
        with pytest.raises(ServerDiedError):  # before it is late
            server.receive(deadline)
    server.end()


# Harming the server and the next program


SIGNALS = """
import os, signal
def send(process, numbers):
    for number in numbers:
        try: os.kill(process, number)
        except OSError: pass
    print("alive", flush=True)
"""


def test_signals_to_the_server(sandbox: Sandbox) -> None:
    source = f"{SIGNALS}\nassert os.getppid() == 1\nsend(1, [*range(1, 65), signal.SIGSTOP, signal.SIGKILL])"
    assert sandbox.run(source, limits=SMALL).output == b"alive\n"
    server = sandbox._servers["programs"]
    assert sandbox.run("print(2)", limits=SMALL).output == b"2\n"
    assert sandbox._servers["programs"] is server  # it was never ended


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_signals_to_all_processes(sandbox: Sandbox, number: str) -> None:
    ran = sandbox.run(f"{SIGNALS}\nsend(-1, [signal.{number}])", limits=SMALL)
    assert (ran.ending, ran.output) == ("finished", b"alive\n")


def test_limits_of_the_server(sandbox: Sandbox) -> None:
    attempts = [f"resource.prlimit(1, resource.RLIMIT_{name}, (0, 0))" for name in ("CPU", "NOFILE", "NPROC", "AS")]
    attempts += ["os.setpriority(os.PRIO_PROCESS, 1, 19)", "os.sched_setaffinity(1, {0})"]
    attempts += ["os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))"]
    refused(sandbox, *attempts, setup="import resource")


def test_closing_all_files(sandbox: Sandbox) -> None:
    assert sandbox.run("import os\nos.closerange(0, 1000)", limits=SMALL).output == b""
    fails(
        sandbox,
        "import os\nfor n in range(3, 200):\n    try: os.dup2(1, n)\n    except OSError: pass\ndef f(): return 1",
    )


def test_files_that_cannot_be_removed(sandbox: Sandbox) -> None:
    source = "import os\nos.makedirs('/tmp/a/b')\nos.symlink('/usr', '/tmp/link')\nos.mkfifo('/tmp/fifo')\n"
    source += "os.chmod('/tmp/a', 0)\nos.chmod('/tmp', 0)\nopen('/dev/shm/x', 'w')"
    assert sandbox.run(source, limits=SMALL).ending == "finished"


def test_times_of_folders_that_an_earlier_program_has_set(sandbox: Sandbox) -> None:
    places = ("/tmp", "/dev/shm")
    setting = "".join(f"os.utime({place!r}, ns=(123456789, 987654321))\nos.chmod({place!r}, 0)\n" for place in places)
    look = (
        "print([(os.stat(p).st_mtime_ns, os.stat(p).st_atime_ns, oct(os.stat(p).st_mode)) for p in " + f"{places}])\n"
    )
    first, second = (sandbox.run(f"import os\n{look}{setting}", limits=SMALL).output for _ in range(2))
    assert first == second == sandbox.run(f"import os\n{look}", limits=SMALL).output


def test_modules_that_an_earlier_program_has_changed(sandbox: Sandbox) -> None:
    source = "import sys, math, builtins\nmath.pi = builtins.mine = 4\nsys.path.clear()\nsys.modules.pop('re')"
    assert sandbox.run(source, limits=SMALL).ending == "finished"
    look = "import builtins, math, re, sys\nprint(math.pi < 4, hasattr(builtins, 'mine'), bool(sys.path))"
    for program in (look, f"{look}\n{source}", f"{look}\n{source}"):  # also one run after another of one program
        assert sandbox.run(program, limits=SMALL).output == b"True False True\n"


def test_a_daemon_that_outlives_its_program(sandbox: Sandbox) -> None:
    source = """
import os, signal, time
if not os.fork():
    os.setsid()
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    if not os.fork():
        while True:
            open("/tmp/spy", "w").write("here")
            time.sleep(0.001)
    os._exit(0)
time.sleep(0.05)
"""
    ran = sandbox.run(source, limits=SMALL)
    assert ran.ending == "finished"


def test_a_hostile_server_is_ended() -> None:
    """Where a program had broken into the server: whatever that says, the client is not held up and takes no value."""
    with Sandbox(packages=()) as sandbox:
        for said in (b"\xff" * 100, b"[" * 4000, b"[]", b"{} " * 2000, b"9" * 5000, b""):
            server = Server((), ())
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            server._link.close()
            server._link = ours
            theirs.sendall(said)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(ServerDiedError):
                server.receive(time.monotonic() + 20)
            server.end()
            theirs.close()
        assert sandbox.run("print(1)").output == b"1\n"


def test_a_killed_server_is_started_again(sandbox: Sandbox) -> None:
    sandbox._servers["programs"]._process.kill()
    assert sandbox.run("print(1)").output == b"1\n"


def test_no_process_stays_after_a_kill_of_the_holder() -> None:
    program = "import os, time\nif not (os.fork() and os.fork()): os.setsid()\ntime.sleep(1000)"
    holder = (
        f"from gspo.sandbox.sandbox import *\nSandbox(packages=()).run({program!r}, limits=Limits(wall_seconds=500))"
    )
    process = subprocess.Popen([sys.executable, "-c", holder])
    inside: list[psutil.Process] = []
    while len(inside) < 5:  # bubblewrap, the server, the program and its two forks
        assert process.poll() is None
        time.sleep(0.05)
        inside = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(inside, timeout=60)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert [p for p in alive if p.status() != "zombie"] == []


def test_memory_of_the_holder_is_bounded() -> None:
    holder = """
import resource
from gspo.sandbox.sandbox import Limits, Sandbox
with Sandbox(packages=()) as sandbox:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for source in ("import os\\nwhile True: os.write(1, bytes(2**20))", "while True: print('x' * 2**20)"):
        assert sandbox.run(source, limits=Limits(output_bytes=2**22)).ending == "output"
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = subprocess.run([sys.executable, "-c", holder], stdout=subprocess.PIPE, check=True).stdout
    assert int(re.findall(rb"\d+", grown)[0]) < 32 * 1024  # kB
