"""What lies between the listed faults: a closed terminal, an error at a bad moment, a run killed as it began."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.laboratory import SECONDS, Laboratory, differing

Unbroken = Callable[..., dict[str, Any]]
COLD = 3  # optimiser steps before the first of GSPO, which has two a step
# A process whose end of the terminal's line is what it hears of when the other is closed.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_closed_terminal_saves_the_run_and_ends_it(laboratory: Laboratory, unbroken: Unbroken) -> None:
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, "-m", "gspo.cli", "train", "run.yaml"],
        cwd=laboratory.home,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )
    os.close(inner)
    give_up = time.monotonic() + SECONDS
    while not (laboratory.run / "cold_start.jsonl").exists():
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.002)
    os.close(terminal)
    assert process.wait(timeout=SECONDS) == 129
    assert laboratory.checkpoints(folder="cold_start_checkpoints") or laboratory.checkpoints()
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_output_that_nobody_reads_any_more_ends_nothing(laboratory: Laboratory, unbroken: Unbroken) -> None:
    assert laboratory.train(fault=("deaf_output", {})) == 0
    assert not differing(laboratory.result(), unbroken())


@pytest.mark.parametrize(
    ("place", "count", "folder", "last"),
    [
        ("cold record", 3, "cold_start_checkpoints", "step_000002"),
        ("optimizer step", COLD + 2, "checkpoints", "step_000000_batch"),  # after the first mini-batch of step 1
    ],
)
def test_an_error_between_an_optimiser_step_and_its_record_saves_nothing_wrong(
    place: str, count: int, folder: str, last: str, laboratory: Laboratory, unbroken: Unbroken
) -> None:
    assert laboratory.train("checkpoint.seconds=1e-9", fault=("fail_at", {"place": place, "count": count})) == 1
    assert "between an optimiser step and its record" in laboratory.said
    assert laboratory.checkpoints(folder=folder)[-1] == last
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_an_error_before_the_first_optimiser_step_of_an_update_saves_its_batch(
    laboratory: Laboratory, unbroken: Unbroken
) -> None:
    assert laboratory.train(fault=("fail_at", {"place": "optimizer step", "count": COLD + 3})) == 1
    assert "saved: run/checkpoints/step_000001_batch" in laboratory.said
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_a_run_killed_before_it_had_a_recipe_begins_anew(laboratory: Laboratory, unbroken: Unbroken) -> None:
    for command in (("train", "run.yaml"), ("train", "run.yaml", "--resume")):
        again = laboratory.beside(f"begun_{len(command)}")
        again.run.mkdir()
        (again.run / "lock").write_text("process 1 on a machine that is gone\n")
        (again.run / "unfinished_0123456789abcdef_recipe.yaml").write_text("name: ru")
        assert again.start(*command).wait() == 0, again.said
        assert not differing(again.result(), unbroken())


def test_a_signal_after_a_write_that_failed_still_saves(laboratory: Laboratory, unbroken: Unbroken) -> None:
    fault = ("fail_then_signal", {"place": "publish", "count": 2, "number": 15})
    assert laboratory.train(fault=fault) == 143, laboratory.said
    assert "Input/output error" in laboratory.said and "saved: run/checkpoints/step" in laboratory.said
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_fewer_steps_than_are_done_are_refused(laboratory: Laboratory) -> None:
    fault = ("signal_at", {"place": "optimizer step", "count": 8, "number": 15})
    assert laboratory.train(fault=fault) == 143
    for steps in (1, 2):  # two are done, and a part of the third
        assert laboratory.resume(f"steps={steps}") == 2
        assert f"further than steps={steps}" in laboratory.said and "3 or more" in laboratory.said
    assert laboratory.resume("steps=3") == 0, laboratory.said


def test_checkpoints_that_were_set_aside_as_damaged_are_remembered(laboratory: Laboratory) -> None:
    assert laboratory.train(fault=("signal_at", {"place": "optimizer step", "count": 10, "saved": True})) == -9
    for name in laboratory.checkpoints():
        path = laboratory.run / "checkpoints" / name
        path.rename(path.with_name(f"damaged_{name}"))
    assert laboratory.resume() == 2
    assert "its checkpoints are gone, or not of this version of gspo (there are: damaged_step_00000" in laboratory.said


def test_what_was_written_before_the_first_checkpoint_is_set_aside(laboratory: Laboratory, unbroken: Unbroken) -> None:
    kill = ("signal_at", {"place": "optimizer step", "count": 8})
    assert laboratory.train("checkpoint.every=0", fault=kill) == -9
    before = (laboratory.run / "metrics.jsonl").read_bytes()
    assert laboratory.resume("checkpoint.every=1") == 0, laboratory.said
    assert "resumed from run/cold_start: step 3 of the cold start" in laboratory.said
    assert (laboratory.run / "set_aside_1" / "metrics.jsonl").read_bytes() == before
    assert not differing(laboratory.result(), unbroken())


def test_a_run_is_resumed_from_anywhere_in_the_directory_it_was_begun_in(
    laboratory: Laboratory, unbroken: Unbroken, tmp_path: Path
) -> None:
    assert laboratory.train(fault=("signal_at", {"place": "optimizer step", "count": 8, "saved": True})) == -9
    elsewhere = laboratory.beside("elsewhere")
    elsewhere.reward("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")
    status = elsewhere.start("resume", str(laboratory.run)).wait()
    assert status == 0, elsewhere.said
    assert f"in {laboratory.home}, where the run was started" in elsewhere.said
    assert not differing(laboratory.result(), unbroken())


def test_what_makes_a_resume_inexact_is_said(laboratory: Laboratory) -> None:
    assert laboratory.train(fault=("signal_at", {"place": "optimizer step", "count": 8, "saved": True})) == -9
    with (laboratory.home / "reward.py").open("a") as file:
        file.write("# another thought\n")
    assert laboratory.resume("actor.micro_batch_tokens=100") == 0, laboratory.said
    assert "NOT an exact resume: actor.micro_batch_tokens was 16384, is 100" in laboratory.said
    assert "NOT an exact resume: code of reward score was" in laboratory.said
    assert "resumed from" not in laboratory.said and "goes on from" in laboratory.said
