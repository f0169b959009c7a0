"""Runs broken off at a given call and taken up again, and all that two runs must have in common."""

import importlib
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gspo
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.run.console import Display

TINY = Path(__file__).with_name("tiny.yaml")
VARIES = ("time/", "throughput/", "memory/", "seconds", "idle_fraction")  # between two runs of one recipe
COLD_GRADIENT, GRADIENT = "gspo.learner.sft.response_likelihood", "gspo.learner.loss._surrogate"
SAMPLING, REWARD, EVALUATION = (
    "gspo.engine.embedded.decoding.sample_tokens",
    "gspo.run.collect.score_each",
    "gspo.run.recorder.evaluate",
)
ROUND, APPRAISAL, LIKELIHOOD = (
    "gspo.run.collect._queries",
    "gspo.learner.trainer.score_with_models",
    "gspo.learner.trainer.compute_old_logprobs",
)


def recipe_of(name: str, *overrides: str) -> Recipe:
    reward = "reward=[{function: format, options: {pattern: '[1-4]'}}]"
    fixed = [f"name={name}", "steps=3", "evaluation.every=2", "actor.mini_batches=2", reward]
    return load_recipe(TINY, [*fixed, *overrides])


def train(recipe: Recipe, **given: Any) -> Any:
    return gspo.train(recipe, display=Display(quiet=True), **given)


def raise_signal(number: signal.Signals) -> None:
    """Raise a signal; a thread that samples then gives the trainer, which looks now and then, the time to hear it."""
    signal.raise_signal(number)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.5)


def break_off(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, place: str, count: int, **given: Any) -> Any:
    """Train until a signal that comes at the `count`-th call of a place is heard."""
    module, _, name = place.rpartition(".")
    owner, calls = importlib.import_module(module), []
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        if len(calls) == count:
            raise_signal(signal.SIGINT)
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        outcome = train(recipe, **given)
    assert outcome.signal == signal.SIGINT and len(calls) >= count
    return outcome


def lasting(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not any(v in key for v in VARIES)} for line in lines]


def logged(path: Path) -> list[dict[str, Any]]:
    return lasting([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def result(name: str) -> dict[str, Any]:
    """All that two runs must have in common."""
    run = Path("runs", name)
    last = max((run / "checkpoints").iterdir())
    paths = [*(run / "model").iterdir(), *(run / "rollouts").iterdir(), *(last / "model").iterdir()]
    contents: dict[str, Any] = {str(path.relative_to(run)): path.read_bytes() for path in paths}
    state = load_file(last / "state.safetensors")  # optimiser, critic and random generators
    del state["random/python"]  # beartype draws from it, in these tests, whenever it checks a container
    contents |= {
        name: (tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in state.items()
    }
    for log in ("metrics.jsonl", *(["cold_start.jsonl"] if (run / "cold_start.jsonl").exists() else [])):
        contents[log] = logged(run / log)
        assert logged(last / log) == contents[log]
    progress = json.loads((last / "state.json").read_text(encoding="utf-8"))
    return contents | {name: progress[name] for name in ("batches_drawn", "clip_scale", "reference_sha256")}


def differing(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*one, *two}) if one.get(name) != two.get(name)]
