"""The ranks of a run, wherever they were started: told of signals, and ended together."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from gspo.errors import SILENT, listed

LOST = -128  # the exit code of a rank that does not end, or whose host does not answer; no signal's
FIX = "\n  fix: gspo resume goes on from the last checkpoint"
_SIGNALLED = 128  # is less than the exit code of a run that a signal has ended
_TWICE_SECONDS = 1.0
_END_SECONDS = 5.0  # that ranks have to end by themselves once one has failed, and again once they are asked to
_LOST_SECONDS = 10.0  # that a killed rank has to be gone
_POLL_SECONDS = 0.05


class RankProcess(Protocol):
    """A rank's process, of this machine or another. Its methods are those of subprocess.Popen."""

    returncode: int | None  # of a signal's number, below zero; None while it runs; what is set counts from then on

    def poll(self) -> int | None:
        """See whether it has ended; its exit code."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""

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
    """The exit code of a run, once all of its ranks have ended or are lost.

    The first signal goes on to every rank, and the second ends them at once. Where a rank fails, all end.
    """
    received: list[signal.Signals] = []
    try:
        with _collected_signals(received):
            failed = _watch(ranks, received)
    finally:
        _kill(ranks)
    return _exit_code(ranks, received, failed)


def _watch(ranks: Sequence[RankProcess], received: Sequence[signal.Signals]) -> set[int]:
    """Wait until all have ended or are to be killed; the ranks that have failed by themselves."""
    failed: set[int] = set()
    failed_at, is_passed_on, is_asked = 0.0, False, False
    while None in [process.poll() for process in ranks]:
        if not is_asked:
            failed |= {number for number, process in enumerate(ranks) if process.returncode}
        failed_at = failed_at or (time.monotonic() if failed else 0.0)
        seconds = time.monotonic() - failed_at if failed else 0.0
        if len(received) > 1 or seconds > 2 * _END_SECONDS:
            return failed
        if received and not is_passed_on:
            is_passed_on = True
            _signal(ranks, received[0])
        if seconds > _END_SECONDS and not is_asked:
            is_asked = True
            _signal(ranks, signal.SIGTERM)
        time.sleep(_POLL_SECONDS)
    return failed if is_asked else {number for number, process in enumerate(ranks) if process.returncode}


def _kill(ranks: Sequence[RankProcess]) -> None:
    """End those that still run; one that does not end is lost: its host is gone, or it waits for a disk that is."""
    _signal(ranks, signal.SIGKILL)
    killed_at = time.monotonic()
    while None in [process.poll() for process in ranks] and time.monotonic() - killed_at < _LOST_SECONDS:
        time.sleep(_POLL_SECONDS)
    for process in ranks:
        if process.poll() is None:
            process.returncode = LOST


def _exit_code(ranks: Sequence[RankProcess], received: Sequence[signal.Signals], failed: set[int]) -> int:
    """The run's. Says why it has ended where no rank does."""
    codes = [process.returncode or 0 for process in ranks]
    causes = [number for number, process in enumerate(ranks) if number in failed or process.returncode == LOST]
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


def _signal(ranks: Sequence[RankProcess], number: int) -> None:
    for process in ranks:
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
