"""What holds foreign code in its bounds: the end of all that a process has started, and a limit of CPU time."""

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from gspo.engine.server.in_server.gspo_supervise import end_marked

MARK = "GSPO_REWARD_WORKER"  # an environment variable that a worker's descendants inherit
GRACE_SECONDS = 2  # of CPU time, after which a computation that does not heed its limit ends its process


def end_tree(leader: int, mark: str) -> None:
    """Kill the leader of a process group, its group, its descendants and all processes that bear its mark.

    The leader must not have been waited for yet: its number could be another's. This process itself goes last.
    """
    end_marked(MARK, mark, leader=leader)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
        os.killpg(leader, signal.SIGKILL)


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
