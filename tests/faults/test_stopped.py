"""Faults 4, 5, 17 and 20: signals that ask a run to end, a second run in its directory, a clock that is set back."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.faults.laboratory import AS_EVER, Laboratory, differing

Unbroken = Callable[..., dict[str, Any]]
STUCK = (
    AS_EVER
    + """
import pathlib, time

def score(completions, **columns):
    if pathlib.Path("run/checkpoints").exists():
        pathlib.Path("stuck").touch()
        time.sleep(600)
    return as_ever(completions, **columns)
"""
)
TERM, INT, HUP = (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)  # one handler notes any of them
SAFE_POINTS = [
    ("sampling", 28, "step_000002", [TERM, INT]),
    ("sampling", 40, "step_000003_updated", [TERM]),  # in the last evaluation
    ("sampling", 3, "step_000000", [TERM, HUP]),  # in the evaluation before the first step
    ("gradient", 1, "step_000000_batch", [TERM, INT]),
    ("gradient", 3, "step_000000_updated", [TERM, INT]),  # after an optimiser step: the update runs to its end
    ("old likelihoods", 3, "step_000001_batch", [TERM]),
    ("cold gradient", 1, "cold_start_checkpoints/step_000001", [TERM, INT]),
    ("optimizer step", 6, "step_000001_updated", [TERM, HUP]),
    ("snapshot", 2, "step_000001", [TERM]),
]


@pytest.mark.parametrize(
    ("place", "count", "saved", "number", "status"),
    [(*where, *own) for *where, signals in SAFE_POINTS for own in signals],
)
def test_a_signal_saves_the_last_safe_point(
    place: str, count: int, saved: str, number: int, status: int, laboratory: Laboratory, unbroken: Unbroken
) -> None:
    assert laboratory.train(fault=("signal_at", {"place": place, "count": count, "number": number})) == status
    folder, _, name = f"checkpoints/{saved}".rpartition("/")
    folder = folder.rpartition("/")[2]
    assert laboratory.checkpoints(folder=folder)[-1] == name, laboratory.said
    assert "gspo resume run" in laboratory.said
    assert not (laboratory.run / "model").exists()  # the final one only
    assert laboratory.resume() == 0, laboratory.said
    assert f"resumed from run/{folder}/{name}" in laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_a_signal_does_not_wait_for_a_reward_and_the_step_is_begun_again(
    laboratory: Laboratory, unbroken: Unbroken
) -> None:
    good = (laboratory.home / "reward.py").read_text()
    laboratory.reward(STUCK)
    process = laboratory.start("train", "run.yaml")
    laboratory.wait_for("stuck", process)
    process.send(signal.SIGTERM)
    assert process.wait() == 143
    assert laboratory.checkpoints()[-1] == "step_000001", laboratory.said
    laboratory.reward(good)
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_a_second_signal_ends_a_run_at_once_and_what_was_saved_before_is_whole(
    number: int, status: int, laboratory: Laboratory, unbroken: Unbroken
) -> None:
    assert laboratory.train(fault=("signal_at", {"place": "optimizer step", "count": 6})) == -9
    process = laboratory.start("resume", "run", fault=("stuck_save", {"path": "stuck"}))
    laboratory.wait_for("stuck", process)
    process.send(number)
    time.sleep(0.1)  # for the first to be heard: two at once would be one
    assert process.is_running()
    process.send(number)
    assert process.wait() == status
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


@pytest.mark.parametrize("command", [("resume", "run"), ("train", "run.yaml", "--resume"), ("train", "run.yaml")])
def test_a_second_run_in_one_directory_is_refused_and_the_first_is_not_disturbed(
    command: tuple[str, ...], laboratory: Laboratory, unbroken: Unbroken
) -> None:
    first = laboratory.start("train", "run.yaml", fault=("slow_steps", {"seconds": 0.15}))
    laboratory.wait_for("run/checkpoints/step_000001", first)
    assert laboratory.start(*command).wait() == 2
    assert first.is_running()
    assert ("is writing to this directory" in laboratory.said) == ("train" not in command or "--resume" in command)
    assert first.wait() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_a_clock_that_is_set_back_changes_nothing(laboratory: Laboratory, unbroken: Unbroken) -> None:
    back = ("clock_set_back", {"count": 7})
    assert laboratory.train("checkpoint.seconds=0.05", fault=back) == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_the_newest_checkpoint_is_the_furthest_whatever_the_files_dates_say(
    laboratory: Laboratory, unbroken: Unbroken
) -> None:
    assert laboratory.train(fault=("signal_at", {"place": "optimizer step", "count": 10})) == -9
    newest = laboratory.checkpoints()[-1]
    for path in (laboratory.run / "checkpoints" / newest).rglob("*"):
        os.utime(path, (0, 0))
    os.utime(laboratory.run / "checkpoints" / newest, (0, 0))
    assert laboratory.resume() == 0, laboratory.said
    assert f"resumed from run/checkpoints/{newest}:" in laboratory.said
    assert not differing(laboratory.result(), unbroken())
