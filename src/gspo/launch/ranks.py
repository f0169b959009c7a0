"""The ranks of a run: processes of this machine, and whatever ranks are, told of signals and ended together."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

import psutil

from gspo.errors import HAS_LAUNCHER, RENDEZVOUS, SILENT, UserError, listed
from gspo.loop import in_thread
from gspo.rank_environment import world_size

LOST = -128  # the exit code of a rank that does not end, or whose host does not answer; no signal's
FIX = "\n  fix: gspo resume goes on from the last checkpoint"
_SIGNALLED = 128  # is less than the exit code of a run that a signal has ended
_TWICE_SECONDS = 1.0  # within which a signal that comes twice is one
_END_SECONDS = 10.0  # that ranks have to end by themselves once one has failed
_LOST_SECONDS = 10.0  # that a killed rank has to be gone
_POLL_SECONDS = 0.05
_LIBRARIES = 350 * 2**20  # bytes of a process


class RankProcess(Protocol):
    """A rank's process, of this machine or another. Its methods are those of subprocess.Popen."""

    returncode: int | None  # of a signal's number, below zero; None while it runs; what is set counts from then on

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...
    def how_ended(self) -> str: ...  # why it has no exit code of its own, where that is so


def with_restarts(run: Callable[[], int], max_failures: int | None, say: Callable[[str], object]) -> int:
    """The exit code of a run that is made again where it fails, 3 times at most if no number is given.

    It has to go on from what is saved. Wrong input and signals end it at once.
    """
    max_failures = 3 if max_failures is None else max_failures
    for number in range(max_failures):
        code = run()
        if code in (0, 2) or code > _SIGNALLED:
            return code
        say(f"starting again from the newest checkpoint, after failure {number + 1} of {max_failures} at most")
    return run()


def run_ranks(ranks: Sequence[RankProcess]) -> int:
    """The exit code of a run, once all of its ranks have ended or are lost.

    The first signal goes on to every rank, and the second ends them at once. Where a rank fails, all end.
    """
    received, came_at = list[signal.Signals](), dict[int, float]()

    def collect(number: int, frame: FrameType | None) -> None:
        """Keep it for later: what asks after the ranks may be in the middle of that."""
        # A Ctrl-C comes from the terminal, and again from a program such as `timeout` that has started this one.
        if time.monotonic() - came_at.get(number, -_TWICE_SECONDS) >= _TWICE_SECONDS:
            received.append(signal.Signals(number))
        came_at[number] = time.monotonic()

    heeded = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    heeded = [number for number in heeded if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, collect) for number in heeded}
    try:
        failed = _watch(ranks, received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _kill(ranks)
    return _exit_code(ranks, received, failed)


def _watch(ranks: Sequence[RankProcess], received: Sequence[signal.Signals]) -> list[int]:
    """Wait until all have ended or are to be killed; the ranks that have failed by themselves, in their order."""
    failed, failed_at, is_passed_on = list[int](), 0.0, False
    while True:
        is_over = None not in [rank.poll() for rank in ranks]
        failed += [number for number, rank in enumerate(ranks) if rank.returncode and number not in failed]
        if failed:
            failed_at = failed_at or time.monotonic()
        if is_over or len(received) > 1 or (failed_at and time.monotonic() - failed_at > _END_SECONDS):
            return failed
        if received and not is_passed_on:
            is_passed_on = True
            _signal(ranks, received[0])
        time.sleep(_POLL_SECONDS)


def _kill(ranks: Sequence[RankProcess]) -> None:
    """End those that still run; one that does not end is lost: its host is gone, or it waits for a disk that is."""
    _signal(ranks, signal.SIGKILL)
    killed_at = time.monotonic()
    while None in [rank.poll() for rank in ranks] and time.monotonic() - killed_at < _LOST_SECONDS:
        time.sleep(_POLL_SECONDS)
    for rank in ranks:
        if rank.poll() is None:
            rank.returncode = LOST


def _signal(ranks: Sequence[RankProcess], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _exit_code(ranks: Sequence[RankProcess], received: Sequence[signal.Signals], failed: Sequence[int]) -> int:
    """The run's. Says why it has ended where no rank does."""
    codes = [rank.returncode or 0 for rank in ranks]
    causes = [*failed, *(number for number, code in enumerate(codes) if code == LOST and number not in failed)]
    # A rank that a signal ends before it listens to signals has not failed.
    ended = [number for number in causes if codes[number] < 0 and -codes[number] not in received]
    said = [codes[number] for number in causes if 0 < codes[number] != SILENT]
    if len(received) > 1 and any(codes):
        print(f"ended at once by {received[1].name}{FIX}")
    elif ended:
        print(f"failed: rank {ended[0]} {ranks[ended[0]].how_ended()}{FIX}")
    elif received and (codes[0] < 0 or codes[0] == SILENT) and all(code > _SIGNALLED for code in said):
        print(f"ended by {received[0].name}")  # of which no rank but the first speaks
    elif causes and not said and not received:
        stuck = listed([f"rank {number}" for number, code in enumerate(codes) if code == -signal.SIGKILL])
        lost = f"rank {causes[0]} has lost the others, and then they have lost it"
        print(f"failed: {f'{stuck} has kept the others waiting, and had to be killed' if stuck else lost}{FIX}")
    code = next(iter(said), int(any(codes)))
    return _SIGNALLED + received[0] if code and received else code


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
