"""The ranks of a run, wherever they were started: told of signals, and ended together."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from gspo.errors import SILENT, listed

FIX = "\n  fix: gspo resume goes on from the last checkpoint"
_SIGNALLED = 128  # is less than the exit code of a run that a signal has ended
_TWICE_SECONDS = 1.0
_END_SECONDS, _POLL_SECONDS = 5.0, 0.05  # that ranks have to end by themselves once one has failed, and once more


class RankProcess(Protocol):
    """A rank's process, of this machine or another. Its methods are those of subprocess.Popen."""

    returncode: int | None  # of a signal's number, below zero; None while it runs

    def poll(self) -> int | None:
        """See whether it has ended; its exit code."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""

    is_lost: bool  # it cannot be reached any more, and counts as ended

    def how_ended(self) -> str:
        """Why it has no exit code of its own, where that is so."""


def with_restarts(run: Callable[[], int], max_failures: int, say: Callable[[str], object]) -> int:
    """The exit code of a run that is made again where it fails: it has to go on from what is saved.

    Wrong input and signals end it at once.
    """
    for number in range(max_failures):
        code = run()
        if code in (0, 2) or code > _SIGNALLED:
            return code
        say(f"starting again from the newest checkpoint, after failure {number + 1} of {max_failures} at most")
    return run()


def run_ranks(ranks: Sequence[RankProcess]) -> int:
    """The exit code of a run, once all of its ranks have ended.

    The first signal goes on to every rank, and the second ends them at once. Where a rank fails, all end.
    """
    received: list[signal.Signals] = []
    try:
        with _collected_signals(received):
            code = _exit_code(ranks, received)
        return _SIGNALLED + received[0] if code and received else code
    finally:
        for process in ranks:
            _signal(process, signal.SIGKILL)
        for process in ranks:
            process.wait()


def _exit_code(ranks: Sequence[RankProcess], received: Sequence[signal.Signals]) -> int:
    failed: dict[int, bool] = {}  # by the rank: whether it has ended by itself
    since, num_warnings, handed = 0.0, 0, 0
    while None in [process.poll() for process in ranks]:
        time.sleep(_POLL_SECONDS)
        for number in received[handed:]:
            for process in ranks:
                _signal(process, signal.SIGKILL if handed else number)
            handed += 1
        since = since if failed else time.monotonic()
        failed |= {
            number: not num_warnings
            for number, process in enumerate(ranks)
            if process.returncode and number not in failed
        }
        if failed and time.monotonic() - since > _END_SECONDS * (num_warnings + 1):
            for process in ranks:
                _signal(process, signal.SIGKILL if num_warnings else signal.SIGTERM)
            num_warnings += 1
    codes = [process.returncode or 0 for process in ranks]
    causes = [
        number
        for number, code in enumerate(codes)
        if code and (failed.get(number, not num_warnings) or ranks[number].is_lost)
    ]
    if len(received) > 1:
        print(f"ended at once by {received[1].name}{FIX}")
    elif ended := [number for number in causes if codes[number] < 0]:
        print(f"failed: rank {ended[0]} {ranks[ended[0]].how_ended()}{FIX}")
    elif causes and all(codes[number] == SILENT for number in causes):
        stuck = listed([f"rank {number}" for number, code in enumerate(codes) if code == -signal.SIGKILL])
        lost = f"rank {causes[0]} has lost the others, and then they have lost it"
        print(f"failed: {f'{stuck} has kept the others waiting, and had to be killed' if stuck else lost}{FIX}")
    return next((codes[number] for number in causes if codes[number] > 0 and codes[number] != SILENT), int(any(codes)))


def _signal(process: RankProcess, number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)


@contextmanager
def _collected_signals(received: list[signal.Signals]) -> Iterator[None]:
    """Collect signals: what asks after ranks may be in the middle of that, and sends them on afterwards.

    The same one twice within a second is one: a Ctrl-C comes from the terminal, and again from a program such as
    `timeout` that has started this one.
    """
    at: dict[int, float] = {}  # by signal: when it came last

    def collect(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - at.get(number, -_TWICE_SECONDS) >= _TWICE_SECONDS:
            received.append(signal.Signals(number))
        at[number] = time.monotonic()

    numbers = [
        each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
