"""Runs on several processes: the same as on one, resumed on any number of them, and ended together."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.faults.laboratory import Server

from gspo import cli
from gspo.learner.state import tensors_of

TINY = Path(__file__).parents[1] / "tiny.yaml"
EXPERTS = {
    **{"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
    **{"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"tie_word_embeddings": True, "max_position_embeddings": 128},
}
KEYS = ["checkpoint.every=2", "checkpoint.keep=9", "actor.kl.coefficient=0.05", "evaluation.num_queries=3"]
KEYS_OF_EXPERTS = [
    *KEYS,
    *(f"model.architecture={json.dumps(EXPERTS)}", "actor.routing_replay=policy", "actor.router_aux_loss=0.01"),
    "rollout.dynamic_sampling=true",
]
# Between two runs of one recipe, and with the number of processes.
VARIES = ("time/", "throughput/", "memory/", "seconds", "idle_fraction", "balance/", "moe/recorded_bytes")
SECONDS = 120  # after which a test gives up; none takes nearly as long
ENDED_SECONDS = 60  # within which a run that has lost a rank ends
Start = Callable[..., "subprocess.Popen[str]"]
Launch = Callable[..., "Forked"]


class Forked:
    """A launcher and ranks without imports of their own: copies of a process that has all of it (tests/faults)."""

    returncode: int | None = None

    def __init__(self, server: Server, home: Path, arguments: tuple[str, ...], ranks: str) -> None:
        self._outputs = [home / "out", home / "err"]
        for path in self._outputs:
            path.unlink(missing_ok=True)
        self._process = server.start(list(arguments), home, (ranks, {}))
        self.pid, self.send_signal = self._process.pid, self._process.send

    def said(self) -> str:
        return "".join(path.read_text() for path in self._outputs if path.exists())

    def poll(self) -> int | None:
        if self.returncode is None and not self._process.is_running():
            self.returncode = self._process.wait()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str]:
        if self.returncode is None:
            self.returncode = self._process.wait(timeout)
        return (self.said(),)


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
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def launch(home: Path, server: Server) -> Iterator[Launch]:
    """Starts gspo in the directory, with ranks that it forks; a launcher that is left is ended after the test."""
    launched = list[Forked]()

    def launch(*arguments: str, ranks: str = "forked_ranks") -> Forked:
        launched.append(Forked(server, home, arguments, ranks))
        return launched[-1]

    yield launch
    for launcher in launched:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Any]:
    """What a run of one process comes to."""
    return _on_one(home, "alone", *KEYS_OF_EXPERTS, "steps=6")


@pytest.fixture(scope="module")
def paired(home: Path) -> dict[str, Any]:
    """What the same run of two processes comes to."""
    keys = ["name=paired", *KEYS_OF_EXPERTS, "steps=6", "--processes", "2"]
    command = [sys.executable, "-m", "gspo", "train", str(TINY), *keys]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("evaluating on 3 queries") == 1, "only one of the processes talks"
    return _result(home / "runs/paired")


def test_two_processes_sample_the_same_and_learn_the_same(alone: dict[str, Any], paired: dict[str, Any]) -> None:
    _assert_same(alone, paired)
    assert max(line["group/sampled"] for line in paired["lines"][1:]) > 8, "groups were replaced"
    for result, most in ((alone, 1.0), (paired, 2.0)):
        measured = [line["time/update_slowest_over_mean"] for line in result["lines"][1:]]
        assert all(1.0 <= value <= most for value in measured), "by definition"


def test_a_run_goes_on_on_other_numbers_of_processes(
    home: Path, launch: Launch, alone: dict[str, Any], paired: Any
) -> None:
    """From two processes to four, from four to two, from two to one, and from one to two."""
    before, after = home / "runs/paired", home / "runs/moved"
    shutil.copytree(before, after)
    for name in ("step_000004", "step_000006"):
        shutil.rmtree(after / "checkpoints" / name)
    shutil.rmtree(after / "model")
    for steps, was, number in ((3, 2, 4), (4, 4, 2), (6, 1, 2)):
        process = launch("resume", "runs/moved", f"steps={steps}", "--processes", str(number))
        said = _ended(process)
        assert process.returncode == 0, said
        assert re.search(rf"NOT an exact resume: .*ranks was {was}, is {number}", said)
        files = sorted(path.name for path in (after / f"checkpoints/step_00000{steps}").glob("state*.safetensors"))
        assert files == ["state.safetensors", *(f"state_{other}.safetensors" for other in range(1, number))]
        if steps == 4:
            _on_one(home, "moved", "steps=5", resume=True)
    _assert_same(alone, _result(after))


def test_a_signal_to_the_launcher_or_to_a_rank_stops_all_processes_once_and_the_run_goes_on_bit_by_bit(
    home: Path, launch: Launch, paired: dict[str, Any]
) -> None:
    process = launch("train", str(TINY), "name=stopped", *KEYS_OF_EXPERTS, "steps=6", "--processes", "2")
    _wait_for(home / "runs/stopped/checkpoints/step_000002", process)
    process.send_signal(signal.SIGTERM)
    said = _ended(process)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert said.count("saved: ") == 1
    process = launch("resume", "runs/stopped", "--processes", "2")
    _wait_until(lambda: "resumed from" in process.said(), process)  # all ranks are there, and steps to come
    os.kill(_ranks_of(process.pid)[1], signal.SIGTERM)
    assert _ended(process) and process.returncode == 128 + signal.SIGTERM
    process = launch("resume", "runs/stopped", "--processes", "2")
    assert _ended(process) and process.returncode == 0
    found = _result(home / "runs/stopped")
    assert found["responses"] == paired["responses"]
    assert all(torch.equal(found["weights"][name], own) for name, own in paired["weights"].items())


GPUS = "forked_ranks_on_gpus"  # and NCCL: what a lost rank would have sent is waited for without end


@pytest.mark.parametrize(
    ("harm", "said", "kind"),
    [
        (lambda ranks: os.kill(ranks[0], signal.SIGKILL), "rank 0 was ended by SIGKILL", "forked_ranks"),
        (lambda ranks: os.kill(ranks[1], signal.SIGSTOP), "rank 1 has given no sign of life", "forked_ranks"),
        (lambda ranks: os.kill(ranks[1], signal.SIGSTOP), "rank 1 has given no sign of life", GPUS),
        (lambda ranks: _limit_files(ranks[1]), "state_1.safetensors, of rank 1: ", "forked_ranks"),
    ],
    ids=["killed 0", "stuck 1", "stuck 1 under NCCL", "full disk of 1"],
)
def test_all_end_with_one_message_where_a_rank_is_lost(
    harm: Callable[[list[int]], None], said: str, kind: str, home: Path, launch: Launch
) -> None:
    shutil.rmtree(home / "runs/harmed", ignore_errors=True)
    keys = [*KEYS, "name=harmed", "steps=9999", "cold_start.steps=0"]
    if "sign of life" in said:
        keys += ["trainer.timeout_seconds=4"]  # a rank that is gone is noticed before
    process = launch("train", str(TINY), *keys, "--processes", "2", ranks=kind)
    _wait_for(home / "runs/harmed/checkpoints/step_000002", process)
    ranks = _ranks_of(process.pid)
    harm(ranks)
    began = time.monotonic()
    output = _ended(process)
    assert time.monotonic() - began < ENDED_SECONDS
    assert process.returncode == 1
    assert output.count("failed: ") == 1, output
    assert said in output.partition("failed: ")[2], output
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert "gspo resume" in output
    assert _on_one(home, "harmed", "steps=4", resume=True)["responses"]


OWN_MODEL = """
import os, time, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config):
    model_type = "own"
class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].register_forward_pre_hook(hang)
def hang(*_):
    while torch.is_grad_enabled() and os.environ.get("RANK") == "1" and os.path.exists("hang"):
        time.sleep(0.1)
"""


@pytest.mark.parametrize("kind", ["forked_ranks", GPUS])
def test_a_rank_that_hangs_in_a_pass_and_gives_signs_of_life_is_named(home: Path, launch: Launch, kind: str) -> None:
    """The model runs code of its own directory, which other ranks have to load by themselves.

    It hangs in a pass of the update: for a rank that samples the others wait however long it takes.
    """
    _on_one(home, f"dense_{kind}", "steps=1", "cold_start.steps=0")
    shutil.copytree(home / f"runs/dense_{kind}/model", model := home / f"own_{kind}")
    (model / "own.py").write_text(OWN_MODEL)
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    keys = [f"model.path={model.name}", "model.trust_remote_code=true", "model.architecture=null"]
    keys += [
        "model.tokenizer=null",
        *KEYS,
        f"name=hung_{kind}",
        "steps=9999",
        "cold_start.steps=0",
        "trainer.timeout_seconds=4",
    ]
    process = launch("train", str(TINY), *keys, "--processes", "2", ranks=kind)
    _wait_for(home / f"runs/hung_{kind}/checkpoints/step_000002", process)
    (home / "hang").touch()
    output = _ended(process)
    (home / "hang").unlink()
    assert process.returncode == 1 and output.count("failed: ") == 1, output
    assert "failed: rank 1 has kept the others waiting" in output, output


def test_a_signal_to_rank_0_alone_while_all_sample_saves_the_run(home: Path, launch: Launch) -> None:
    """Rank 0 hears it in another thread than the one that has the ranks sample."""
    long = ["rollout.max_new_tokens=900", "model.architecture.max_position_embeddings=1024", "rollout.group_size=32"]
    keys = [*KEYS, *long, "rollout.logit_bias={1: -100}", "cold_start.steps=0", "name=sampling", "steps=9999"]
    process = launch("train", str(TINY), *keys, "--processes", "2")
    _wait_until(lambda: "optimiser steps" in process.said(), process)
    time.sleep(1)
    os.kill(_ranks_of(process.pid)[0], signal.SIGTERM)
    said = _ended(process)
    assert process.returncode == 128 + signal.SIGTERM and said.count("saved: ") == 1, said


def test_where_the_launcher_is_killed_its_ranks_save_and_end(home: Path, start: Start) -> None:
    """With an engine that samples while the policy is trained."""
    keys = [*KEYS, "rollout.max_staleness=1", "name=orphaned", "steps=9999"]
    process = start("train", str(TINY), *keys, "--processes", "2")
    _wait_for(home / "runs/orphaned/checkpoints/step_000002", process)
    ranks = _ranks_of(process.pid)
    process.kill()
    assert "saved: " in _ended(process)
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        time.sleep(0.05)
    text = (home / "runs/orphaned/metrics.jsonl").read_text()
    assert [json.loads(line)["staleness/max"] for line in text.splitlines()[1:3]] == [0.0, 1.0]


def test_torchrun_starts_a_run_with_a_value_model(home: Path, start: Start) -> None:
    """PPO, with a value model of its own, copies of the model on two ranks, and groups sampled a step ahead."""
    keys = ["actor.advantage=gae", "actor.importance_sampling_level=token", "critic.trunk=own", "trainer.sharding=none"]
    keys += ["rollout.max_staleness=1", "rollout.in_turn=true"]
    alone = _on_one(home, "ppo", *keys)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gspo")
    process = start("train", str(TINY), "name=ppo-2", *keys, program=torchrun)
    said = _ended(process)
    assert process.returncode == 0, said
    _assert_same(alone, _result(home / "runs/ppo-2"))
    assert alone["lines"][-1]["staleness/max"] == 1.0


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
    optimizer = dict(tensors_of(max((run / "checkpoints").glob("step_??????")), "optimizer"))
    weights = load_file(run / "model/model.safetensors")
    return {"lines": lines, "responses": responses, "weights": weights, "optimizer": optimizer}


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same responses; all numbers that do not vary, weights and the optimiser's moments but for rounding."""
    assert other["responses"] == one["responses"]
    for line, own in zip(one["lines"], other["lines"], strict=True):
        assert all("evaluation" in name for name in own.keys() ^ line.keys()), (
            "after the last step of a resume there is one"
        )
        for name in own.keys() & line.keys():
            if not any(part in name for part in VARIES):
                assert _flat(own[name]) == pytest.approx(_flat(line[name]), rel=1e-4, abs=1e-6, nan_ok=True), name
    for part in ("weights", "optimizer"):
        assert other[part].keys() == one[part].keys()
        for name, tensor in one[part].items():
            # Not the largest: where a gradient is next to nothing, Adam makes much of how it is rounded.
            difference = torch.dist(other[part][name].double(), tensor.double())
            assert difference <= 5e-6 * tensor.double().norm(), name


def _flat(value: Any) -> list[float]:
    """The numbers of a metric, which may be a list of lists; NaN for null."""
    if isinstance(value, list):
        return [number for entry in value for number in _flat(entry)]
    return [math.nan if value is None else value]


def _wait_for(path: Path, process: "subprocess.Popen[str] | Forked") -> None:
    _wait_until(path.exists, process)


def _wait_until(is_so: Callable[[], bool], process: "subprocess.Popen[str] | Forked") -> None:
    began = time.monotonic()
    while not is_so():
        assert process.poll() is None, process.communicate(timeout=SECONDS)[0]
        assert time.monotonic() - began < SECONDS
        time.sleep(0.05)


def _ended(process: "subprocess.Popen[str] | Forked") -> str:
    """What it has said, once it has ended."""
    return process.communicate(timeout=SECONDS)[0]


def _ranks_of(launcher: int) -> list[int]:
    """The process of each rank, in the order in which they were started."""
    return [rank.pid for rank in sorted(psutil.Process(launcher).children(), key=lambda rank: rank.create_time())]


def _limit_files(pid: int) -> None:
    """No file that the process writes may grow beyond a few KB: as a disk that is full."""
    import resource

    resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
