"""The ranks of a run as processes of this machine."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from gspo.errors import HAS_LAUNCHER, RENDEZVOUS, UserError
from gspo.launch.supervise import LOST, run_ranks
from gspo.loop import in_thread
from gspo.rank_environment import world_size

_LIBRARIES = 350 * 2**20  # bytes of a process


class LocalRank(subprocess.Popen[bytes]):
    """A rank of a run, as a process of this machine: it ends when this one does."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, Any], **options: Any) -> None:
        """Run gspo with these arguments, and these variables beside this process's own."""
        texts = {name: str(value) for name, value in environment.items()}
        command = [sys.executable, "-m", "gspo", *arguments]
        # A session of its own, so that Ctrl-C comes to a rank once, from here. Its input ends with this process.
        options |= {"stdin": subprocess.PIPE, "start_new_session": True}
        super().__init__(command, env={**os.environ, **texts, HAS_LAUNCHER: "yes"}, **options)

    def how_ended(self) -> str:
        """Return which signal has ended it, or that none does."""
        if self.returncode == LOST:
            return f"(process {self.pid}) does not end, not even by SIGKILL: perhaps it waits for a disk or a GPU"
        name = signal.Signals(-(self.returncode or 0)).name
        return f"was ended by {name}" + (": perhaps by the system, for lack of memory" if name == "SIGKILL" else "")


def run_processes(arguments: Sequence[str], number: int) -> int:
    """Run gspo with these arguments as so many ranks of one run; its exit code, once all of them have ended.

    UserError in a rank, and where the ranks' libraries alone would take more memory than there is.
    """
    if world_size() > 1:
        raise UserError("this is already one of several processes", where="--processes", fix="leave it out")
    free = psutil.virtual_memory().available
    if number * _LIBRARIES > free:
        what = f"{number} processes take {number * _LIBRARIES / 2**30:.1f} GiB before they have a model"
        fix = f"start {max(1, free // _LIBRARIES)} at most"
        raise UserError(f"{what}, and {free / 2**30:.1f} GiB are free", where="--processes", fix=fix)
    with tempfile.TemporaryDirectory(prefix="gspo-ranks-") as directory:  # which nobody else may read
        usual: dict[str, Any] = {
            "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // number),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        shared = {name: os.environ.get(name, value) for name, value in usual.items()}
        shared |= {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, RENDEZVOUS: f"file://{directory}/store"}
        own = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(number)]
        return run_ranks([LocalRank(arguments, environment) for environment in own])


def end_with_launcher() -> None:
    """Send a rank that was started here a signal, as from a person, where the process that started it is gone."""
    if HAS_LAUNCHER not in os.environ:
        return

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    in_thread("launcher", watch)
