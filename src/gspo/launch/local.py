"""The ranks of a run as processes of this machine: started, told of signals, and ended together."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from gspo.errors import SILENT

RENDEZVOUS = "GSPO_RENDEZVOUS"  # of the environment: the file by which the ranks find each other
_FIX = "\n  fix: gspo resume goes on from the last checkpoint"
_END_SECONDS, _POLL_SECONDS = 5.0, 0.05  # that ranks have to end by themselves once one has failed, and once more


def run_processes(arguments: Sequence[str], number: int) -> int:
    """Run gspo with these arguments as so many ranks of one run; its exit code, once all of them have ended.

    The first signal goes on to every rank, and the second ends them at once. Where a rank fails, all end.
    """
    with tempfile.TemporaryDirectory(prefix="gspo-ranks-") as directory:  # which nobody else may read
        ranks = [_start(arguments, own, number, Path(directory)) for own in range(number)]
        try:
            with _signals_for(ranks):
                return _exit_code(ranks)
        finally:
            for process in ranks:
                _signal(process, signal.SIGKILL)
            for process in ranks:
                process.wait()


def end_with_launcher() -> None:
    """In a rank that was started here: a signal, as from a person, where the process that started it is gone."""
    if RENDEZVOUS not in os.environ:
        return

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher").start()


def _start(arguments: Sequence[str], own: int, number: int, directory: Path) -> "subprocess.Popen[bytes]":
    threads = max(1, len(os.sched_getaffinity(0)) // number)
    places = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **os.environ,
    }
    environment |= {name: str(value) for name, value in places.items()}
    environment[RENDEZVOUS] = f"file://{directory}/store"
    command = [sys.executable, "-m", "gspo", *arguments]
    # A session of its own, so that Ctrl-C comes to a rank once, from here. Its input ends with this process.
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)


def _exit_code(ranks: "Sequence[subprocess.Popen[bytes]]") -> int:
    failed: int | None = None
    since, told = 0.0, 0
    while any(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)
        if failed is None:
            failed = next((own for own, process in enumerate(ranks) if process.poll()), None)
            since = time.monotonic()
        elif time.monotonic() - since > _END_SECONDS * (told + 1):
            for process in ranks:
                _signal(process, signal.SIGKILL if told else signal.SIGTERM)
            told += 1
    if failed is not None and (code := ranks[failed].returncode) < 0:
        name = signal.Signals(-code).name
        why = ": perhaps by the system, for want of memory" if name == "SIGKILL" else ""
        print(f"failed: rank {failed} was ended by {name}{why}{_FIX}")
    elif failed is not None and all(process.returncode == SILENT for process in ranks):
        print(f"failed: rank {failed} has lost the others, and then they have lost it{_FIX}")
    codes = [
        process.returncode for process in ranks if process.returncode not in (0, SILENT) and process.returncode > 0
    ]
    return codes[0] if codes else int(failed is not None)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(number)


@contextmanager
def _signals_for(ranks: "Sequence[subprocess.Popen[bytes]]") -> Iterator[None]:
    """Hand the first signal on to all ranks; the second ends them."""
    count = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        for process in ranks:
            _signal(process, number if count == 1 else signal.SIGKILL)

    numbers = [own for own in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(own) != signal.SIG_IGN]
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
