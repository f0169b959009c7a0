"""Whole runs on a GPU that is pretended: every operator's devices agree, the numbers are the CPU's, and waits are few.

What a kernel itself refuses, streams, NCCL and memory are not seen so. GSPO_TESTS_ON_GPU=1 takes a real GPU instead.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from tests.needs import needs
from tests.pretended_gpu.__main__ import MARK
from tests.small_model import save_small_model

IS_REAL = os.environ.get("GSPO_TESTS_ON_GPU") == "1"  # benchmarks/gpu.py sets it
pytestmark = needs("g++")
counted = needs("waits")

ROOT = Path(__file__).parents[1]
TINY, CALCULATOR = ROOT / "tests/tiny.yaml", ROOT / "recipes/calculator.yaml"
SHAPE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURE = [f"model.architecture.{key}={value}" for key, value in {**SHAPE, "norm_topk_prob": "true"}.items()]
FLOAT32 = "model.dtype=float32"
MINI_BATCHES = 4
ONE = ["steps=1", "cold_start.steps=1", "evaluation.num_queries=2"]
CUT = ["actor.gradient_noise=false", "actor.micro_batch_tokens=60"]  # several micro-batches of a mini-batch
CHAT = ["model={path: model}", "cold_start.steps=0"]  # which was saved there
REPLAY = ["actor.routing_replay=policy", "actor.router_aux_loss=0.1", "actor.kl.coefficient=0.1"]
REPLAY += ["actor.gradient_checkpointing=true"]
DRAWS = ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.repetition_penalty=1.1", "rollout.stop_strings=['1 ']"]
DRAWS += ["rollout.max_rows=12"]  # which are refilled
EXACT = {
    "dense": (TINY, [*ONE, *CUT]),
    "mixture": (TINY, [*ONE, *CUT, *MIXTURE, *REPLAY]),
    "engine_experts": (TINY, [*ONE, *MIXTURE, "actor.routing_replay=engine", "actor.correction=tis"]),
    "value_model": (TINY, [*ONE, "actor.surrogate=ppo"]),
    "adapter": (TINY, [*ONE, *CHAT, "model.lora={rank: 4}", "actor.kl.coefficient=0.1"]),
    "other_draws": (TINY, [*ONE, *DRAWS, "actor.optimizer.name=torch.optim.Muon", "actor.entropy_bonus=0.01"]),
    "conversations": (CALCULATOR, [*ONE, "rollout.queries_per_step=4", "rollout.group_size=4"]),
}
WEIGHTS = {  # as servers get them
    "dense_weights": [],
    "mixture_weights": MIXTURE,
    "adapter_weights": [*CHAT, "model.lora={rank: 4}"],
}
ONLY_RUN = {
    "bfloat16": (TINY, [*ONE, "model.dtype=bfloat16"]),
    "ahead": (TINY, ["cold_start.steps=1", "evaluation.num_queries=2", "rollout.max_staleness=1"]),
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command left.

    Example: Ran(status=0, waits={"learner/loss.py:107": 14}, copies={}, output="…", metrics=[{"step": 1}], files={})
    """

    status: int
    waits: Mapping[str, int]
    copies: Mapping[str, int]
    output: str
    metrics: list[dict[str, Any]]
    files: Mapping[str, bytes]  # of weights


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Mapping[str, Ran]:
    """All runs that tests will look at, one after another in one process, by "cuda_dense" and such."""
    directory = tmp_path_factory.mktemp("pretended")
    save_small_model(directory / "model")
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    needed = {item.callspec.params.get("name") for item in items if item.path == request.path}
    commands = {
        f"{device}_{name}": ["train", str(recipe), f"name={device}_{name}", *words, f"model.device={device}", *rest]
        for cases, devices, rest in ((EXACT, ("cpu", "cuda"), [FLOAT32]), (ONLY_RUN, ("cuda",), []))
        for name, (recipe, words) in cases.items()
        if name in needed
        for device in devices
    }
    commands |= {
        f"{device}_{name}": ["weights", f"{device}_{name}", *keys, f"model.device={device}", FLOAT32]
        for name, keys in WEIGHTS.items()
        if name in needed
        for device in ("cpu", "cuda")
    }
    given = "".join(f"{json.dumps(words)}\n" for words in commands.values())
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.pretended_gpu", str(directory)]
    made = subprocess.run(
        command, input=given, capture_output=True, text=True, cwd=directory, env=environment, check=False
    )
    pieces = made.stdout.split(MARK)
    assert len(pieces) == len(commands) + 1, made.stderr[-5000:]
    runs = {}
    for name, output, piece in zip(commands, pieces, pieces[1:], strict=False):
        file = directory / "runs" / name / "metrics.jsonl"
        metrics = [*map(json.loads, file.read_text().splitlines())] if file.exists() else []
        said = json.loads(piece.partition("\n")[0])
        files = {
            str(file.relative_to(directory / name)): file.read_bytes() for file in directory.glob(f"{name}/**/*.*")
        }
        runs[name] = Ran(**said, output=output + made.stderr[-3000:], metrics=metrics, files=files)
    return runs


@pytest.mark.parametrize("name", [*EXACT, *ONLY_RUN])
def test_a_run_ends_well(name: str, ran: Mapping[str, Ran]) -> None:
    run = ran[f"cuda_{name}"]
    assert run.status == 0, run.output
    assert run.waits or IS_REAL, "it did run there"


@pytest.mark.parametrize("name", EXACT)
def test_its_numbers_are_the_cpus(name: str, ran: Mapping[str, Ran]) -> None:
    ours, theirs = (ran[f"{device}_{name}"].metrics for device in ("cuda", "cpu"))
    assert len(ours) == len(theirs) > 1
    for own, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            if not is_of_the_machine(key):
                assert is_close(own[key], value), (key, own[key], value)


@pytest.mark.parametrize("name", WEIGHTS)
def test_servers_get_the_same_weights_bit_by_bit(name: str, ran: Mapping[str, Ran]) -> None:
    """By files, true and scrambled, and by vLLM's sender."""
    ours, theirs = (ran[f"{device}_{name}"] for device in ("cuda", "cpu"))
    assert ours.status == theirs.status == 0, ours.output
    assert ours.files == theirs.files
    assert {Path(file).parts[0] for file in ours.files} == {"true", "scrambled", "sent.safetensors"}
    assert ours.files["true/model-00001.safetensors"] != ours.files["scrambled/model-00001.safetensors"]


@counted
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_host_waits_for_each_tensor_when_it_is_looked_at_and_when_it_is_copied(
    name: str, ran: Mapping[str, Ran]
) -> None:
    """It looks in two writings and twice for a sender, and copies in three: the last is the test's own."""
    run = ran[f"cuda_{name}"]
    num_tensors = len(safetensors.torch.load(run.files["sent.safetensors"]))
    assert num_tensors <= sum(run.waits.values()) <= (4 + 3) * num_tensors


def is_of_the_machine(key: str) -> bool:
    return key.startswith(("time/", "throughput/", "memory/")) or key.endswith("/seconds")


def is_close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
    return bool(one == other)


@counted
@pytest.mark.parametrize(("name", "most"), [("dense", 1), ("mixture", 2)])
def test_an_update_waits_for_the_gpu_once_a_micro_batch_and_four_times_a_mini_batch(
    name: str, most: int, ran: Mapping[str, Ran]
) -> None:
    """A mixture waits for the sizes of its experts' shares, too."""
    files = ("learner/loss.py", "learner/update.py", "learner/optimizer.py")
    waits = {line: count for line, count in ran[f"cuda_{name}"].waits.items() if line.startswith(files)}
    of_micro_batches = {line: count for line, count in waits.items() if count > MINI_BATCHES + 1}  # 1 of the cold start
    assert 1 <= len(of_micro_batches) <= most
    assert sum(waits.values()) - sum(of_micro_batches.values()) <= 4 * MINI_BATCHES + 1
