"""Runs on several processes: the same as on one, resumed on any number of them, and ended together."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo import cli

TINY = Path(__file__).parents[1] / "tiny.yaml"
KEYS = ["checkpoint.every=2", "checkpoint.keep=9", "actor.kl.coefficient=0.05", "evaluation.num_queries=3"]
SECONDS = 120  # after which a test gives up; none takes nearly as long
ENDED_SECONDS = 60  # within which a run that has lost a rank ends
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """Starts gspo in the directory; whatever is left of it is ended after the test."""
    started = []

    def start(*arguments: str, program: tuple[str, ...] = (sys.executable, "-m", "gspo")) -> "subprocess.Popen[str]":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([*program, *arguments], cwd=home, env=environment, **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Any]:
    """What a run of one process comes to."""
    return _on_one(home, "alone", *KEYS, "steps=6")


@pytest.fixture(scope="module")
def paired(home: Path) -> dict[str, Any]:
    """What the same run of two processes comes to."""
    command = [sys.executable, "-m", "gspo", "train", str(TINY), "name=paired", *KEYS, "steps=6", "--processes", "2"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("evaluating on 3 queries") == 1, "only one of the processes talks"
    return _result(home / "runs/paired")


def test_two_processes_sample_the_same_and_learn_the_same(alone: dict[str, Any], paired: dict[str, Any]) -> None:
    _assert_same(alone, paired)


def test_a_run_goes_on_on_other_numbers_of_processes(
    home: Path, start: Start, alone: dict[str, Any], paired: Any
) -> None:
    """From two processes to four, and from four to one."""
    before, after = home / "runs/paired", home / "runs/moved"
    shutil.copytree(before, after)
    for name in ("step_000004", "step_000006"):
        shutil.rmtree(after / "checkpoints" / name)
    shutil.rmtree(after / "model")
    process = start("resume", "runs/moved", "steps=4", "--processes", "4")
    said = _ended(process)
    assert process.returncode == 0, said
    assert "NOT an exact resume: ranks was 2, is 4" in said
    assert sorted(path.name for path in (after / "checkpoints/step_000004").glob("state*.safetensors")) == [
        *("state.safetensors", "state_1.safetensors", "state_2.safetensors", "state_3.safetensors")
    ]
    _assert_same(alone, _on_one(home, "moved", "steps=6", resume=True))


def test_a_signal_stops_all_processes_once_and_the_run_goes_on_bit_by_bit(
    home: Path, start: Start, paired: dict[str, Any]
) -> None:
    process = start("train", str(TINY), "name=stopped", *KEYS, "steps=6", "--processes", "2")
    _wait_for(home / "runs/stopped/checkpoints/step_000002", process)
    process.send_signal(signal.SIGTERM)
    said = _ended(process)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert said.count("saved: ") == 1
    process = start("resume", "runs/stopped", "--processes", "2")
    assert _ended(process) and process.returncode == 0
    found = _result(home / "runs/stopped")
    assert found["responses"] == paired["responses"]
    assert all(torch.equal(found["weights"][name], own) for name, own in paired["weights"].items())


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda ranks: os.kill(ranks[0], signal.SIGKILL), "rank 0 was ended by SIGKILL"),
        (lambda ranks: os.kill(ranks[1], signal.SIGSTOP), "rank 1 has given no sign of life"),
        (lambda ranks: _limit_files(ranks[1]), "state_1.safetensors, of rank 1: "),
    ],
    ids=["killed 0", "stuck 1", "full disk of 1"],
)
def test_all_end_with_one_message_where_a_rank_is_lost(
    harm: Callable[[dict[int, int]], None], said: str, home: Path, start: Start
) -> None:
    shutil.rmtree(home / "runs/harmed", ignore_errors=True)
    keys = [*KEYS, "name=harmed", "steps=9999", "cold_start.steps=0"]
    if "sign of life" in said:
        keys += ["trainer.timeout_seconds=4"]  # a rank that is gone is noticed before
    process = start("train", str(TINY), *keys, "--processes", "2")
    _wait_for(home / "runs/harmed/checkpoints/step_000002", process)
    ranks = _ranks_of(process.pid)
    harm(ranks)
    began = time.monotonic()
    output = _ended(process)
    assert time.monotonic() - began < ENDED_SECONDS
    assert process.returncode == 1
    assert output.count("failed: ") == 1, output
    assert said in output.partition("failed: ")[2], output
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert "gspo resume" in output
    assert _on_one(home, "harmed", "steps=4", resume=True)["responses"]


OWN_MODEL = """
import os, time
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config):
    model_type = "own"
class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].register_forward_pre_hook(hang)
def hang(*_):
    while os.environ.get("RANK") == "1" and os.path.exists("hang"):
        time.sleep(0.1)
"""


def test_a_rank_that_hangs_in_a_pass_and_gives_signs_of_life_is_named(home: Path, start: Start, paired: Any) -> None:
    """The model runs code of its own directory, which other ranks have to load by themselves."""
    shutil.copytree(home / "runs/paired/model", model := home / "own")
    (model / "own.py").write_text(OWN_MODEL)
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    keys = ["model.path=own", "model.trust_remote_code=true", "model.architecture=null", "model.tokenizer=null"]
    keys += [*KEYS, "name=hung", "steps=9999", "cold_start.steps=0", "trainer.timeout_seconds=4"]
    process = start("train", str(TINY), *keys, "--processes", "2")
    _wait_for(home / "runs/hung/checkpoints/step_000002", process)
    (home / "hang").touch()
    output = _ended(process)
    (home / "hang").unlink()
    assert process.returncode == 1 and output.count("failed: ") == 1, output
    assert "failed: rank 1 has kept the others waiting" in output, output


def test_where_the_launcher_is_killed_its_ranks_save_and_end(home: Path, start: Start) -> None:
    process = start("train", str(TINY), *KEYS, "name=orphaned", "steps=9999", "--processes", "2")
    _wait_for(home / "runs/orphaned/checkpoints/step_000002", process)
    ranks = _ranks_of(process.pid)
    process.kill()
    assert "saved: " in _ended(process)
    while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
        time.sleep(0.05)


def test_torchrun_starts_a_run_with_a_value_model(home: Path, start: Start) -> None:
    """PPO, with a value model of its own, copies of the model on two ranks."""
    keys = ["actor.advantage=gae", "actor.importance_sampling_level=token", "critic.trunk=own", "trainer.sharding=none"]
    alone = _on_one(home, "ppo", *keys)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gspo")
    process = start("train", str(TINY), "name=ppo-2", *keys, program=torchrun)
    said = _ended(process)
    assert process.returncode == 0, said
    _assert_same(alone, _result(home / "runs/ppo-2"))


def _on_one(home: Path, name: str, *keys: str, resume: bool = False) -> dict[str, Any]:
    """The result of a run of this process alone."""
    command = ["resume", f"runs/{name}"] if resume else ["train", str(TINY), f"name={name}"]
    before = Path.cwd()
    os.chdir(home)
    try:
        assert cli.main([*command, *keys]) == 0
    finally:
        os.chdir(before)
    return _result(home / "runs" / name)


def _result(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = sorted((run / "rollouts").glob("*.jsonl"))
    responses = [[json.loads(line)["completion"] for line in path.read_text().splitlines()] for path in files]
    return {"lines": lines, "responses": responses, "weights": load_file(run / "model/model.safetensors")}


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same responses; numbers and weights but for rounding."""
    assert other["responses"] == one["responses"]
    for line, own in zip(one["lines"], other["lines"], strict=True):
        for name in (
            "reward/mean",
            "policy/entropy",
            "policy/loss",
            "policy/grad_norm",
            "evaluation/held_out/pass_at_1",
        ):
            if name in line and name in own:
                assert own[name] == pytest.approx(line[name], rel=1e-4, abs=1e-7), name
    for name, weight in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], weight, rtol=0, atol=2e-6 * float(weight.abs().max()))


def _wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    began = time.monotonic()
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() - began < SECONDS
        time.sleep(0.05)


def _ended(process: "subprocess.Popen[str]") -> str:
    """What it has said, once it has ended."""
    return process.communicate(timeout=SECONDS)[0]


def _ranks_of(launcher: int) -> dict[int, int]:
    """The process of each rank."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(") ")[2].split()[1]) != launcher:
                continue
            environment = (path.parent / "environ").read_text().split("\0")
        except OSError:  # it has just ended
            continue
        ranks = [int(entry.removeprefix("RANK=")) for entry in environment if entry.startswith("RANK=")]
        found |= dict.fromkeys(ranks, int(path.parent.name))
    return found


def _limit_files(pid: int) -> None:
    """No file that the process writes may grow beyond a few KB: as a disk that is full."""
    import resource

    resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
