"""What becomes of a run whose ranks end in different ways, and when it is started again."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gspo import cli
from gspo.errors import SILENT
from gspo.launch.ranks import LOST, LocalRank, run_ranks, with_restarts


class _Program(LocalRank):
    """Any program, in place of a rank."""

    def __init__(self, code: str) -> None:
        subprocess.Popen.__init__(self, [sys.executable, "-c", code])


WAITS, FAILS, ENDS = "import time; time.sleep(60)", "import sys; sys.exit(1)", "pass"
STUCK = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
SAYS_NOTHING, KILLED = f"import sys; sys.exit({SILENT})", "import os; os.kill(os.getpid(), 9)"
ABORTS = "import os, time; time.sleep(0.3); os.kill(os.getpid(), 6)"  # as NCCL does with what has lost a rank


@pytest.mark.parametrize(
    ("programs", "code", "said"),
    [
        ((ENDS, ENDS), 0, ""),
        ((FAILS, SAYS_NOTHING), 1, ""),
        ((SAYS_NOTHING, FAILS), 1, ""),
        ((SAYS_NOTHING, KILLED), 1, "rank 1 was ended by SIGKILL"),
        ((KILLED, WAITS), 1, "rank 0 was ended by SIGKILL"),
        ((ABORTS, KILLED), 1, "rank 1 was ended by SIGKILL"),
        ((SAYS_NOTHING, SAYS_NOTHING), 1, "has lost the others"),
        ((SAYS_NOTHING, STUCK), 1, "rank 1 has kept the others waiting"),
    ],
)
def test_one_rank_is_named(
    programs: tuple[str, ...],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gspo.launch.ranks._END_SECONDS", 0.5)
    ranks = [_Program(program) for program in programs]
    assert run_ranks(ranks) == code
    assert all(rank.returncode is not None for rank in ranks)
    output = capsys.readouterr().out
    assert said in output and output.count("failed") == bool(said)


class _Unkillable:
    """A rank that no signal ends, or whose host does not answer."""

    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Is of no use."""

    def how_ended(self) -> str:
        return "does not end"


def test_a_rank_that_nothing_ends_is_given_up_and_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.launch.ranks._END_SECONDS", 0.1)
    monkeypatch.setattr("gspo.launch.ranks._LOST_SECONDS", 0.1)
    assert run_ranks([_Program(SAYS_NOTHING), _Unkillable()]) == 1
    assert capsys.readouterr().out.count("failed: rank 1 does not end") == 1


def test_a_process_that_is_given_up_counts_as_ended() -> None:
    with _Program(WAITS) as process:
        process.returncode = LOST
        assert process.poll() is not None and "not even by SIGKILL" in process.how_ended()
        process.returncode = None  # for this test to end it
        process.kill()


LAUNCHER = """
import subprocess, sys
from gspo.launch.ranks import LocalRank
from gspo.launch.ranks import LOST, run_ranks
class Stubborn(LocalRank):
    def __init__(self):
        ready = f"signal.signal(signal.SIGTERM, {sys.argv[1]}); print('ready', flush=True)"
        code = f"import os, signal, sys, time; {ready}; time.sleep(60)"
        subprocess.Popen.__init__(self, [sys.executable, "-c", code])
        self.is_watched = False
    def poll(self):
        if not self.is_watched:
            self.is_watched = print("watched", flush=True) is None
        return super().poll()
sys.exit(run_ranks([Stubborn()]))
"""


def started(handler: str) -> "subprocess.Popen[str]":
    """A launcher of a rank that does this on SIGTERM."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, handler], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"ready\n", "watched\n"}
    return launcher


def test_a_signal_that_comes_twice_as_from_a_terminal_and_a_wrapper_is_one() -> None:
    launcher = started("lambda *_: (print('saving', flush=True), time.sleep(0.3), sys.exit(0))")
    assert launcher.stdout is not None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.stdout.readline() == "saving\n"
    launcher.send_signal(signal.SIGTERM)
    assert launcher.communicate()[0] == "" and launcher.returncode == 0


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        ("signal.SIG_DFL", "ended by SIGTERM\n"),  # as while Python starts
        (f"lambda *_: sys.exit({SILENT})", "ended by SIGTERM\n"),
        (f"lambda *_: sys.exit({128 + signal.SIGTERM})", ""),  # rank 0 has said it
        ("lambda *_: sys.exit(1)", ""),  # or why it could not save
        ("lambda *_: os.kill(os.getpid(), 9)", "failed: rank 0 was ended by SIGKILL"),
    ],
)
def test_a_signal_is_said_once_and_is_no_failure(handler: str, said: str) -> None:
    launcher = started(handler)
    launcher.send_signal(signal.SIGTERM)
    output = launcher.communicate()[0]
    assert output.startswith(said) and bool(output) == bool(said) and output.count("ended") <= 1
    assert launcher.returncode == 128 + signal.SIGTERM


def test_a_second_signal_ends_all_at_once_and_is_no_failure() -> None:
    launcher = started("signal.SIG_IGN")
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGHUP)  # another one, for two that are the same may arrive as one
    said = launcher.communicate()[0]
    assert "ended at once by SIG" in said and "failed" not in said
    assert launcher.returncode in (128 + signal.SIGTERM, 128 + signal.SIGHUP)


@pytest.mark.parametrize(
    ("codes", "ends_with", "runs"),
    [([1, 1, 0], 0, 3), ([1, 1, 1, 1, 0], 1, 4), ([2, 0], 2, 1), ([1, 143, 0], 143, 2), ([0, 1], 0, 1)],
)
def test_failures_are_tried_again_but_wrong_input_and_signals_are_not(
    codes: list[int], ends_with: int, runs: int
) -> None:
    said, left = list[str](), iter(codes)
    assert with_restarts(lambda: next(left), 3, said.append) == ends_with
    assert len(said) == runs - 1


def test_more_processes_than_the_memory_holds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).parents[1] / "tiny.yaml")
    assert cli.main(["train", recipe, "--processes", "100000"]) == 2
    said = capsys.readouterr().err
    assert "100000 processes take" in said and "at most" in said
