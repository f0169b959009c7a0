"""Signals to a run: the first ends it where its state is whole; the second ends it at once."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import raise_signal

from gspo import cli
from gspo.run.checkpoint.store import Store

TINY = Path(__file__).parents[1] / "tiny.yaml"
SECONDS = 120  # after which a test gives up; none takes nearly as long
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
STUCK_REWARD = """
import pathlib, time


def score(completions, **columns):
    if pathlib.Path("runs/tiny").exists():  # no trial call before the run
        pathlib.Path("stuck").touch()
        time.sleep(600)
    return [0.0 for _ in completions]
"""
STUCK_SAVING = """
import pathlib, sys, time

from gspo import cli
from gspo.run.checkpoint import checkpointer

checkpointer.seal = lambda *_: (pathlib.Path("saving").touch(), time.sleep(600))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def signal_at(monkeypatch: pytest.MonkeyPatch, place: str, count: int, number: signal.Signals) -> list[str]:
    """Send a signal at the `count`-th call of a place; the list grows with each call of it that follows."""
    module, _, name = place.rpartition(".")
    owner = importlib.import_module(module)
    original, calls, after = getattr(owner, name), [], []

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        if len(calls) == count:
            raise_signal(number)
        if len(calls) > count:
            after.append(name)
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, wrapped)
    return after


@pytest.mark.parametrize(
    ("place", "count", "number", "checkpoint"),
    [
        ("gspo.learner.sft.micro_batches", 2, signal.SIGINT, "step_000001"),
        ("gspo.run.recorder.evaluate", 1, signal.SIGTERM, "step_000000"),
        ("gspo.engine.embedded.decoding.sample_tokens", 3, signal.SIGHUP, "step_000000"),
        ("gspo.run.collect.score_each", 1, signal.SIGINT, "step_000000"),
        ("gspo.learner.trainer.compute_old_logprobs", 2, signal.SIGTERM, "step_000001_batch"),
        ("gspo.learner.loss._surrogate", 1, signal.SIGHUP, "step_000000_batch"),  # before any optimiser step
        ("gspo.run.recorder.evaluate", 2, signal.SIGINT, "step_000001_updated"),
    ],
)
def test_a_run_ends_in_the_middle_of_what_it_does_with_a_checkpoint_of_that_instant(
    place: str,
    count: int,
    number: signal.Signals,
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    after = signal_at(monkeypatch, place, count, number)
    assert cli.main(["train", str(TINY)]) == 128 + number
    assert after == []
    run, cold = tmp_path / "runs" / "tiny", "sft" in place
    said, error = capfd.readouterr()
    assert not (run / "model").exists()
    folder = "cold_start_checkpoints" if cold else "checkpoints"
    assert [path.name for path in (run / folder).iterdir()] == [checkpoint]
    found = Store(run / folder).newest()
    assert found is not None and found.path.name == checkpoint
    model = Path("runs", "tiny", folder, checkpoint, "model")
    assert f'AutoModelForCausalLM.from_pretrained("{model}")' in said
    assert "gspo resume runs/tiny" in said and f"by {number.name}" in said
    assert "ending, and saving what is done" in said + error and "Traceback" not in error
    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0
    assert len(AutoTokenizer.from_pretrained(model)) > 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_run_has_begun_ends_it_with_nothing_written(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    after = signal_at(monkeypatch, "gspo.model.inputs.load_config", 1, number)
    assert cli.main(["train", str(TINY)]) == 128 + number
    assert after == [] and list(tmp_path.iterdir()) == []
    error = capfd.readouterr().err
    assert f"ended by {number.name}" in error and "nothing is lost" in error and "saving" not in error


def test_a_signal_when_all_steps_are_done_leaves_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    signal_at(monkeypatch, "gspo.run.recorder.rollout_lines", 2, signal.SIGTERM)  # of the last step's rollouts
    assert cli.main(["train", str(TINY), "evaluation.num_queries=0"]) == 0
    assert (tmp_path / "runs" / "tiny" / "model" / "model.safetensors").is_file()


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `gspo train` with a reward that is stuck, in a session of its own; it is ended with the test."""
    processes: list[subprocess.Popen[str]] = []
    (tmp_path / "stuck_reward.py").write_text(STUCK_REWARD, encoding="utf-8")
    reward = "reward=[{function: 'stuck_reward.py:score', time_limit_seconds: 600}]"

    def start(*python: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, *python, "train", str(TINY), reward, "evaluation.num_queries=0", "cold_start.steps=0"],
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


def test_one_ctrl_c_ends_a_reward_that_is_stuck_and_a_second_one_a_saving_that_is(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = started("-c", STUCK_SAVING)
    wait_for(tmp_path / "stuck", process)
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "saving", process)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, error
    assert "ending, and saving what is done (Ctrl-C again: end at once)" in error and "Traceback" not in error
    assert Store(tmp_path / "runs" / "tiny" / "checkpoints").positions() == []
