"""A run broken off anywhere and resumed is, bit by bit, the run that never was."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.breaking_off import (
    COLD_GRADIENT,
    EVALUATION,
    GRADIENT,
    LIKELIHOOD,
    REWARD,
    SAMPLING,
    differing,
    lasting,
    recipe_of,
    result,
    train,
)


def test_a_run_broken_off_again_and_again_at_every_stage_is_the_unbroken_one(broken_off: Callable[..., Any]) -> None:
    unbroken = train(recipe_of("unbroken"))
    places = [
        (COLD_GRADIENT, 1),
        (COLD_GRADIENT, 1),  # of its second and last step
        (EVALUATION, 1),
        (SAMPLING, 3),
        (REWARD, 1),
        (LIKELIHOOD, 1),
        (GRADIENT, 1),  # the first half of the first mini-batch of step 1
        (GRADIENT, 4),  # the second half of the second one: the first has changed the policy
        (GRADIENT, 3),  # of step 2
        (EVALUATION, 1),  # after step 2
    ]
    names = []
    for number, (place, count) in enumerate(places):
        outcome = broken_off(recipe_of("broken"), place, count, resume=number > 0)
        names.append(outcome.model.parent.name.removeprefix("step_00000"))
    assert names == ["1", "2", "0", "0", "0", "0_batch", "0_batch", "0_updated", "1_updated", "1_updated"]
    outcome = train(recipe_of("broken"), resume=True)
    assert outcome.signal is None
    assert lasting(outcome.metrics) == lasting(unbroken.metrics)
    assert outcome.diagnoses == unbroken.diagnoses
    assert differing(result("broken"), result("unbroken")) == []


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_broken_off_within_an_update_in_bfloat16_with_recomputed_activations(
    family: str, broken_off: Callable[..., Any]
) -> None:
    experts = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, norm_topk_prob: true"
    overrides = [
        "model.dtype=bfloat16",
        "actor.gradient_checkpointing=true",
        "actor.micro_batch_tokens=64",
        "actor.optimizer={lr: 1e-2, schedule: cosine, warmup_steps: 2, weight_decay: 0.1}",
        f"model.architecture.model_type={family}",
    ]
    if family == "qwen3_moe":
        overrides += [f"model.architecture.{pair.replace(': ', '=')}" for pair in experts.split(", ")]
    train(recipe_of("unbroken", *overrides))
    recipe = recipe_of("broken", *overrides)
    before = broken_off(recipe, GRADIENT, 8)  # of step 2, whose two mini-batches are of three parts each
    assert before.model.parent.name == "step_000001_batch"
    within = broken_off(recipe, GRADIENT, 5, resume=True)
    assert within.model.parent.name == "step_000001_updated"
    train(recipe, resume=True)
    assert differing(result("broken"), result("unbroken")) == []


@pytest.mark.parametrize("replay", ["policy", "engine"])
def test_broken_off_with_experts_to_be_replayed(replay: str, broken_off: Callable[..., Any]) -> None:
    sizes = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, num_hidden_layers: 2"
    overrides = [
        f"model.architecture={{model_type: qwen3_moe, hidden_size: 32, {sizes}}}",
        f"actor.routing_replay={replay}",
        "actor.router_aux_loss=0.01",
        "actor.optimizer={lr: 1e-2}",
        "evaluation.num_queries=0",
        "steps=2",
    ]
    train(recipe_of("unbroken", *overrides))
    recipe = recipe_of("broken", *overrides)
    broken_off(recipe, GRADIENT, 6)
    assert max(path.name for path in Path("runs/broken/checkpoints").iterdir()) == "step_000001_updated"
    outcome = train(recipe, resume=True)
    assert differing(result("broken"), result("unbroken")) == []
    for line in outcome.metrics:
        assert line["moe/recorded_bytes"] > 0 and line["moe/expert_change_fraction"] > 0


def test_whatever_draws_random_numbers_on_the_way_draws_the_same(
    broken_off: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, drawn = importlib.import_module("gspo.run.collect"), []
    queries = owner._queries

    def drawing(*arguments: Any, **keywords: Any) -> Any:
        drawn.append((np.random.standard_normal(), np.random.random(), torch.rand(1).item()))
        return queries(*arguments, **keywords)

    monkeypatch.setattr(owner, "_queries", drawing)
    recipe = recipe_of("unbroken", "evaluation.num_queries=0")
    train(recipe)
    expected = drawn.copy()
    assert len(set(expected)) == 3
    for place, count, before, after in [(SAMPLING, 20, 2, 2), (GRADIENT, 5, 2, 1)]:  # both in step 2
        drawn.clear()
        name = f"broken_{place.rpartition('.')[2]}"
        broken_off(recipe.model_copy(update={"name": name}), place, count)
        assert drawn == expected[:before]
        drawn.clear()
        torch.manual_seed(99)
        np.random.seed(99)
        train(recipe.model_copy(update={"name": name}), resume=True)
        assert drawn == expected[-after:]


@pytest.mark.parametrize(
    ("count", "kept"),
    [(6, ["step_000001", "step_000001_batch"]), (7, ["step_000001"])],
    ids=["before the first optimiser step", "after it"],
)
def test_an_error_within_an_update_saves_its_batch_and_once_the_policy_has_changed_nothing(
    count: int, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = GRADIENT.rpartition(".")
    owner, calls = importlib.import_module(module), []
    surrogate = getattr(owner, name)

    def failing(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        if len(calls) == count:  # of step 2: within its first mini-batch, or in its second
            raise ZeroDivisionError
        return surrogate(*arguments, **keywords)

    train(recipe_of("unbroken"))
    recipe = recipe_of("broken", "checkpoint.every=1")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(ZeroDivisionError):
            train(recipe)
    assert sorted(path.name for path in Path("runs/broken/checkpoints").iterdir()) == kept
    train(recipe, resume=True)
    assert differing(result("broken"), result("unbroken")) == []


@pytest.mark.parametrize("seconds", ["null", "1e-9"])
def test_saving_changes_nothing_of_what_is_learned(seconds: str) -> None:
    train(recipe_of("seldom", "checkpoint.seconds=null", "steps=2"))
    train(recipe_of("often", f"checkpoint.seconds={seconds}", "checkpoint.every=1", "checkpoint.keep=1", "steps=2"))
    assert len(list(Path("runs/often/checkpoints").iterdir())) == 1
    assert differing(result("often"), result("seldom")) == []


def test_a_stream_is_read_again_and_further_and_shaped_responses_are_as_they_were(
    broken_off: Callable[..., Any],
) -> None:
    def stream() -> Iterator[dict[str, str]]:
        return ({"prompt": f"{n % 10} + {n // 10 % 10} ="} for n in itertools.count())

    shaping = ["rollout.top_p=0.9", "rollout.repetition_penalty=1.2", "rollout.stop_strings=['3']"]
    Path("demonstrate.py").write_text("def answer(row, rng):\n    return '3'\n", encoding="utf-8")
    cold_start = ["cold_start.steps=2", "cold_start.rows=4", "cold_start.demonstrations=demonstrate.py:answer"]
    data = ["queries.procedural=null", *cold_start, "evaluation.num_queries=4"]
    overrides = [*data, *shaping, "actor.correction=tis"]
    train(recipe_of("unbroken", *overrides), queries=stream())
    broken_off(recipe_of("broken", *overrides, "steps=2"), GRADIENT, 4, queries=stream())  # in step 2
    outcome = train(recipe_of("broken", *overrides), queries=stream(), resume=True)
    assert differing(result("broken"), result("unbroken")) == []
    lines = [line for line in outcome.metrics if line["step"]]
    assert all(0.9 < line["sampling/kept_mass"] < 1.1 for line in lines)
    assert all(line["mismatch/logprob_gap_max"] < 1e-5 for line in lines)  # the engine's π, not q


def test_more_steps_go_on_as_if_they_had_been_asked_for_at_once() -> None:
    train(recipe_of("further", "steps=1"))
    outcome = train(recipe_of("further"), resume=True)
    train(recipe_of("at_once"))
    found, expected = result("further"), result("at_once")
    assert differing(found, expected) == ["metrics.jsonl"]  # evaluated after step 1 too, which was the last
    assert [line["step"] for line in outcome.metrics] == [0, 1, 2, 3]
    for line, other in zip(found["metrics.jsonl"], expected["metrics.jsonl"], strict=True):
        assert {**line, **other} == line


def test_from_a_checkpoint_further_back_the_same_run_comes(tmp_path: Path) -> None:
    train(recipe_of("unbroken"))
    recipe = recipe_of("broken", "checkpoint.every=1", "checkpoint.keep=3")
    train(recipe)
    run = Path("runs/broken")
    for path in (run / "checkpoints" / "step_000003", run / "checkpoints" / "step_000002"):
        weights = path / "model" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    train(recipe, resume=True)
    assert differing(result("broken"), result("unbroken")) == []


def test_a_run_ended_at_once_before_its_first_checkpoint_starts_again_from_its_cold_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("gspo.learner.sft")
    micro_batches, examples = module.micro_batches, []

    def drawing(rows: Any, *arguments: Any) -> Any:
        examples.append((torch.rand(1), np.random.random()))  # as dropout would
        return micro_batches(rows, *arguments)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "micro_batches", drawing)
    train(recipe_of("unbroken", "steps=1"))
    with monkeypatch.context() as patch:
        patch.setattr("gspo.run.collect._queries", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(recipe_of("broken", "steps=1"))
    assert {path.name for path in Path("runs/broken").iterdir() if path.is_dir()} == {"cold_start", "evaluation"}
    examples.clear()
    train(recipe_of("broken", "steps=1"), resume=True)
    assert examples == []
    assert differing(result("broken"), result("unbroken")) == []
