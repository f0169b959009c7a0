"""What holds foreign code in its bounds: the end of all that a process has started, and a limit of CPU time."""

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

MARK = "GSPO_REWARD_WORKER"  # an environment variable that a worker's descendants inherit
GRACE_SECONDS = 2  # of CPU time, after which a computation that does not heed its limit ends its process


def end_tree(leader: int, mark: str) -> None:
    """Kill the leader of a process group, its group, its descendants and all processes that bear its mark.

    The leader must not have been waited for yet: its number could be another's. This process itself goes last.
    """
    stopped: dict[int, psutil.Process] = {}
    # All are stopped before any is killed: none has time to start others, and no orphan gets lost.
    while new := {p.pid: p for p in _members(leader, mark) if p.pid not in stopped and p.pid != os.getpid()}:
        stopped |= new
        for process in new.values():
            with contextlib.suppress(psutil.Error):
                process.suspend()
    for process in stopped.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
        os.killpg(leader, signal.SIGKILL)


def _members(leader: int, mark: str) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(leader)
        yield from [root, *root.children(recursive=True)]
    for process in psutil.process_iter():  # a daemon, or a child of one that has crashed, is no descendant any more
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield process


class _OutOfTime(BaseException):
    """No Exception: the verifiers catch those."""


def within_cpu_limit(seconds: float, score: Callable[..., float], *arguments: Any) -> float:
    """The score, 0.0 where it takes more than the seconds of CPU time, which a busy machine does not change.

    In a worker, one long computation in C that does not heed the limit ends the process. Outside of the main thread,
    where no signal can be handled, there is no limit but the call's own.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise _OutOfTime

    if threading.current_thread() is not threading.main_thread():
        return score(*arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    previous = signal.signal(signal.SIGPROF, interrupt)
    try:
        if MARK in os.environ:
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + GRACE_SECONDS, hard))
        try:  # by itself: the timer may well go off while it is being stopped
            signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)  # again, where one is lost in a callback
            return score(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (_OutOfTime, MemoryError, RecursionError):
        return 0.0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
