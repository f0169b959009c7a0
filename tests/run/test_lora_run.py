"""Runs that train an adapter: resumed bit by bit, with a reference, a value model or a copy of the weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.breaking_off import APPRAISAL, GRADIENT, SAMPLING, differing, lasting, recipe_of, result, train
from tests.needs import needs
from tests.small_model import save_small_model

import gspo
from gspo import cli
from gspo.recipe.schema import Recipe

pytestmark = needs("peft")
PPO = ("actor.advantage=gae", "actor.importance_sampling_level=token", "actor.clip_low=0.2", "actor.clip_high=0.2")
KL = ("actor.kl={coefficient: 0.1}", "actor.advantage=group_mean")
COLD = "cold_start.steps=2"


def lora_recipe(*keys: str, name: str = "broken") -> Recipe:
    """The recipe of a small model in `base/` that gets an adapter."""
    if not Path("base").exists():
        torch.manual_seed(0)
        save_small_model(Path("base"))
    model = "model={path: base, device: cpu, lora: {rank: 4}}"
    return recipe_of(name, model, "evaluation.num_queries=0", "cold_start.steps=0", "queries.chat=false", *keys)


def files(directory: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}


CASES = {
    "alone": (),
    "a reference": KL,
    "after a cold start": (*KL, COLD),
    "a value model": (*PPO, "critic={trunk: shared, optimizer: {lr: 1e-2}}", "actor.gradient_checkpointing=true"),
    "half precision": ("model.dtype=bfloat16",),
    "a copy, in turn": ("rollout.max_staleness=1", "rollout.in_turn=true"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_unbroken_one_and_writes_nothing_but_the_adapter(
    case: str, broken_off: Callable[..., Any]
) -> None:
    recipe = lora_recipe(*CASES[case])
    base = files("base")
    unbroken = train(recipe.model_copy(update={"name": "unbroken"}))
    for place, count in [(SAMPLING, 1), (GRADIENT, 3), *([(APPRAISAL, 1)] if "reference" in case else [])]:
        broken_off(recipe, place, count, resume=recipe.run_dir.exists())
    outcome = train(recipe, resume=True)
    assert lasting(outcome.metrics) == lasting(unbroken.metrics)
    assert differing(result(recipe.name), result("unbroken")) == []
    assert files("base") == base
    saved = load_file(outcome.model / "adapter_model.safetensors")
    assert saved and all(".lora_" in name for name in saved) and saved.values()
    assert any(tensor.any() for name, tensor in saved.items() if "lora_B" in name)
    assert not list(Path("runs").rglob("model.safetensors"))


def test_the_reference_is_the_policy_as_reinforcement_learning_begins() -> None:
    outcome = train(lora_recipe(*KL, COLD, "actor.mini_batches=2"))
    first = outcome.metrics[0]["reference/kl_by_mini_batch"]
    assert abs(first[0]) < 1e-9 < first[1]
    begun = Path("runs/broken/cold_start/model")
    cold, end = (load_file(path / "adapter_model.safetensors") for path in (begun, outcome.model))
    assert any(tensor.any() for name, tensor in cold.items() if "lora_B" in name)
    assert not all(torch.equal(tensor, end[name]) for name, tensor in cold.items())


def test_another_model_beside_the_adapter_is_refused_and_the_run_goes_on_with_its_own() -> None:
    recipe = lora_recipe()
    train(recipe)
    shutil.copytree("base", "kept")
    torch.manual_seed(1)
    shutil.rmtree("base")
    save_small_model(Path("base"))  # other weights, and then another configuration of the same weights
    for _ in range(2):
        with pytest.raises(gspo.UserError, match=r"the files of the model beside the adapter.* are not those"):
            train(recipe.model_copy(update={"steps": 3}), resume=True)
        shutil.rmtree("base")
        shutil.copytree("kept", "base")
        config = json.loads(Path("base/config.json").read_text())
        Path("base/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    shutil.rmtree("base")
    Path("kept").rename("base")
    assert train(recipe.model_copy(update={"steps": 3}), resume=True).metrics[-1]["step"] == 3


def test_a_run_is_merged_evaluated_and_begun_from(
    capsys: pytest.CaptureFixture[str], broken_off: Callable[..., Any]
) -> None:
    lora_recipe()
    keys = ["model={path: base, device: cpu, lora: {}}", "cold_start.steps=0", "queries.chat=false", "steps=1"]
    tiny, eps = str(Path(__file__).parents[1] / "tiny.yaml"), "model.kwargs={rms_norm_eps: 0.3}"
    assert cli.main(["train", tiny, *keys, "name=first", eps, "actor.optimizer.lr=1e-1"]) == 0
    assert "it is an adapter; gspo merge runs/first writes a whole model" in capsys.readouterr().out
    assert cli.main(["merge", "runs/first", "--out", "whole"]) == 0
    assert json.loads(Path("whole/config.json").read_text())["rms_norm_eps"] == 0.3
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = {
        "name": "own",
        "queries": {"path": "rows.jsonl", "chat": False},
        "temperature": 0,
        "samples": 1,
        "max_new_tokens": 6,
    }
    Path("own.yaml").write_text(json.dumps({**suite, "reward": [{"function": "format", "options": {"pattern": "."}}]}))
    completions = []
    for target in ("runs/first", "whole"):
        out = Path("judged", target)
        assert cli.main(["eval", target, "--suite", "own.yaml", "--out", str(out), "model.device=cpu"]) == 0
        tree = json.loads((out / "evaluation.json").read_text())
        completions.append([line["completion"] for line in tree["suites"]["own"]["responses"]])
    assert completions[0] == completions[1] and len(completions[0]) == 4
    begun = [f"model.path={path}" for path in ("whole", "runs/first/model")]
    for number, path in enumerate(begun):
        again = [*keys, path, "model.lora=null", f"name=next{number}", "evaluation.num_queries=0"]
        again += [eps] if number else []
        assert cli.main(["train", tiny, *again]) == 0
    lines = [json.loads(Path(f"runs/next{n}/metrics.jsonl").read_text().splitlines()[-1]) for n in (0, 1)]
    assert lasting(lines[:1]) == lasting(lines[1:])
    recipe = lora_recipe()
    broken_off(recipe, GRADIENT, 3)  # which has no model/ yet
    assert cli.main(["merge", str(recipe.run_dir)]) == 0
    assert (recipe.run_dir / "model_merged" / "config.json").exists()


def test_rank_1_is_enough_to_learn() -> None:
    torch.manual_seed(0)
    save_small_model(Path("base"), initializer_range=0.3, num_hidden_layers=2)
    digits = "reward=[{function: format, options: {pattern: '[0-9]'}}]"
    keys = ("model.lora.rank=1", "steps=10", "actor.optimizer.lr=1e-2", "actor.mini_batches=1", digits)
    rewards = [line["reward/mean"] for line in train(lora_recipe(*keys, "rollout.max_new_tokens=6")).metrics]
    assert rewards[0] < 0.3 and min(rewards[-3:]) > 0.8
