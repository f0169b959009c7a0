"""python gspo_supervise.py PARENT COMMAND…: run a server that ends, with all it has started, when its parent does.

The supervisor looks several times a second whether its parent is still the one that has started it. The server's
processes look after the supervisor in turn (`end_with_supervisor`).
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

SUPERVISOR = "GSPO_SUPERVISOR"  # the environment variable with its process number
END_SECONDS = 5.0  # for what frees shared memory
_TRACKER = "resource_tracker"  # of multiprocessing: it ends after all others, and frees their shared memory
_MOST_SECONDS = 30.0  # a process that waits for a device may not end for as long as that does not answer
_PR_SET_PDEATHSIG = 1  # of prctl


def main() -> None:
    """Start the command, and end all that it has started once it or the parent has ended."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the trainer
    signal.signal(signal.SIGTERM, lambda *_: _end_with_server())
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    with_us = (lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)) if libc else None
    environment = {**os.environ, SUPERVISOR: str(os.getpid())}
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=with_us)  # noqa: PLW1509
        while server.poll() is None and os.getppid() == parent:
            time.sleep(0.1)
        status = server.poll()
        print(f"gspo: the server {'is ended' if status is None else f'has ended with status {status}'}", flush=True)
    except OSError as error:
        print(f"gspo: Error: {command[0]} cannot be started: {error.strerror}", flush=True)
    _end_with_server()


def _end_with_server() -> None:
    end_marked(SUPERVISOR, str(os.getpid()), seconds=END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_supervisor() -> None:
    """Wait for the end of the supervisor, if this process has one, and end all that it has started."""
    if SUPERVISOR not in os.environ or not hasattr(os, "pidfd_open"):
        return
    supervisor = int(os.environ[SUPERVISOR])
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(supervisor)], [], [])
    end_marked(SUPERVISOR, str(supervisor), seconds=END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def end_marked(name: str, mark: str, *, leader: int | None = None, seconds: float = 0.0) -> None:
    """Kill all processes with this environment variable, and a leader with its descendants, but for this one.

    A leader must not have been waited for yet: its number could be another's. What frees shared memory once the others
    have ended has the seconds for that.
    """
    begun, stopped = time.monotonic(), dict[int, psutil.Process]()
    # All are stopped before any is killed: none has time to start others, and no orphan gets lost.
    while new := {p.pid: p for p in _members(name, mark, leader) if p.pid not in stopped and not _is_tracker(p)}:
        stopped |= new
        for process in new.values():
            with contextlib.suppress(psutil.Error):
                process.suspend()
    while (left := _members(name, mark, leader)) and time.monotonic() - begun < _MOST_SECONDS:
        for process in left:
            if not _is_tracker(process) or time.monotonic() - begun >= seconds:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.01)


def _members(name: str, mark: str, leader: int | None) -> list[psutil.Process]:
    """Return those that have not ended, but perhaps not been waited for."""
    found = list[psutil.Process]()
    with contextlib.suppress(psutil.Error):
        if leader is not None:
            root = psutil.Process(leader)
            found += [root, *root.children(recursive=True)]
    for process in psutil.process_iter():  # a daemon, or a child of one that has crashed, is no descendant any more
        with contextlib.suppress(psutil.Error, OSError):
            if process not in found and _mark_of(process, name) == mark:
                found.append(process)
    return [process for process in found if process.pid != os.getpid() and _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return _TRACKER in " ".join(process.cmdline())
    return False


def _mark_of(process: psutil.Process, name: str) -> str | None:
    """Return its environment variable; psutil reads no environment of a process with another title."""
    if sys.platform != "linux":
        return process.environ().get(name)
    with open(f"/proc/{process.pid}/environ", "rb") as file:  # noqa: PTH123
        entries = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
    return entries.get(name.encode(), b"").decode(errors="replace")


if __name__ == "__main__":
    main()
