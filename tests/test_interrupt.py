"""Ctrl-C: the first ends the run after its step, the second at once; the model is saved either way."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo.interrupt import Interrupt

TINY = Path(__file__).with_name("tiny.yaml")
SECONDS = 120  # after which a test gives up; none takes nearly as long
STUCK_REWARD = """
import pathlib, time


def score(completions, **columns):
    if pathlib.Path("runs/tiny/metrics.jsonl").exists():  # after the first step
        pathlib.Path("stuck").touch()
        time.sleep(600)
    return [float(number) for number in range(len(completions))]
"""


def test_the_first_signal_is_a_request_and_the_second_an_interrupt(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(print) as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "saving the model" in capfd.readouterr().out


def test_outside_the_main_thread_the_signal_is_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter() -> None:
        with Interrupt(print) as interrupt:
            seen.append((interrupt.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `gspo train` in a directory and a session of its own; it is ended with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "gspo.cli", "train", str(TINY), "steps=1000000", *overrides],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_written(directory: Path) -> list[dict[str, Any]]:
    path = directory / "runs" / "tiny" / "metrics.jsonl"
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    return [line for line in map(json.loads, whole.splitlines()) if line["step"] > 0]


def test_ctrl_c_ends_a_run_after_its_step_with_code_130_and_a_model_that_loads(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[str]"]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    process = started()
    wait_for(lambda: bool(steps_written(tmp_path)), process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, error
    assert "Traceback" not in error and "saving the model" in error
    model = tmp_path / "runs" / "tiny" / "model"
    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0
    assert len(AutoTokenizer.from_pretrained(model)) > 0
    last = steps_written(tmp_path)[-1]["step"]
    assert (tmp_path / "runs" / "tiny" / "rollouts" / f"step_{last:06d}.jsonl").exists()
    assert not (tmp_path / "runs" / "tiny" / "rollouts" / f"step_{last + 1:06d}.jsonl").exists()


def test_a_second_ctrl_c_ends_a_step_that_is_stuck_and_still_saves_the_model(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[str]"]
) -> None:
    (tmp_path / "stuck_reward.py").write_text(STUCK_REWARD, encoding="utf-8")
    reward = "reward=[{function: 'stuck_reward.py:score', time_limit_seconds: 600}]"
    process = started(reward, "evaluation.num_queries=0", "cold_start.steps=0")
    wait_for((tmp_path / "stuck").exists, process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "saving the model" not in process.stderr.readline():
        assert process.poll() is None
    assert process.poll() is None  # the step goes on
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert (tmp_path / "runs" / "tiny" / "model" / "model.safetensors").is_file()
    assert [line["step"] for line in steps_written(tmp_path)] == [1]


def test_a_held_stretch_is_not_cut_short_by_control_c() -> None:
    with Interrupt(print) as interrupt:
        with interrupt.held():
            os.kill(os.getpid(), signal.SIGINT)
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested  # the handler is back
