"""Ending a process with everything it has started."""

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil

MARK = "GSPO_REWARD_WORKER"  # an environment variable that a worker's descendants inherit


def end_tree(leader: int, mark: str) -> None:
    """Kill the leader of a process group, its group, its descendants and all processes that bear its mark.

    The leader must not have been waited for yet: its number could be another's. This process itself goes last.
    """
    found: dict[int, psutil.Process] = {}
    known = {os.getpid()}
    # All are stopped before any is killed: none has time to start others, and no orphan gets lost.
    while new := {process.pid: process for process in _members(leader, mark) if process.pid not in known}:
        found |= new
        known |= set(new)
        for process in new.values():
            with contextlib.suppress(psutil.Error):
                process.suspend()
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
        os.killpg(leader, signal.SIGKILL)


def _members(leader: int, mark: str) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(leader)
        yield root
        yield from root.children(recursive=True)
    # A daemon, or a child of a process that has crashed, is no descendant any more.
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield process
