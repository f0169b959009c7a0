"""python gspo_supervise.py PARENT COMMAND…: run a server that ends, with all it has started, when its parent does.

The supervisor is the first process of a group of its own and looks several times a second whether its parent is still
the one that has started it. The server's processes look after the supervisor in turn (`end_with_supervisor`).
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
_TRACKER = "resource_tracker"  # of multiprocessing: it ends after all others, and frees their shared memory
_MOST_SECONDS = 30.0  # a process that waits for a device may not end for as long as that does not answer
_PR_SET_PDEATHSIG = 1  # of prctl


def main() -> None:
    """Start the command, and end the group once the command or the parent has ended."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the trainer
    signal.signal(signal.SIGTERM, lambda *_: end_group(os.getpid()))
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
    end_group(os.getpid())


def end_with_supervisor() -> None:
    """Wait for the end of the supervisor, if this process has one, and end its group."""
    if SUPERVISOR not in os.environ or not hasattr(os, "pidfd_open"):
        return
    supervisor = int(os.environ[SUPERVISOR])
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(supervisor)], [], [])
    end_group(supervisor)


def end_group(group: int, *, seconds: float = 5.0) -> None:
    """Kill the processes of a group, this one last where it is among them; what frees their memory may do so first."""
    last, give_up = time.monotonic() + seconds, time.monotonic() + _MOST_SECONDS
    while time.monotonic() < give_up and (
        others := [process for process in _members(group) if process.pid != os.getpid()]
    ):
        for process in others:
            with contextlib.suppress(psutil.Error):
                if time.monotonic() > last or _TRACKER not in " ".join(process.cmdline()):
                    process.kill()
        time.sleep(0.02)
    if os.getpgid(0) == group:
        os.kill(os.getpid(), signal.SIGKILL)


def _members(group: int) -> list[psutil.Process]:
    """Return those that have not ended, but perhaps not been waited for."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_here = os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
            # A group's number is another's once all of it has ended.
            if is_here and (process.pid == os.getpid() or _is_of(process, group)):
                members.append(process)
    return members


def _is_of(process: psutil.Process, group: int) -> bool:
    """Whether the group's supervisor has started it; psutil reads no environment of a process with another title."""
    if sys.platform != "linux":
        return bool(process.environ().get(SUPERVISOR) == str(group))
    with open(f"/proc/{process.pid}/environ", "rb") as file:  # noqa: PTH123
        return f"\0{SUPERVISOR}={group}\0".encode() in b"\0" + file.read() + b"\0"


if __name__ == "__main__":
    main()
