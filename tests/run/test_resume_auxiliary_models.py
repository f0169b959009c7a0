"""With a value model, a reference, dynamic sampling or a clip range that sets itself, a resumed run is the unbroken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.breaking_off import (
    APPRAISAL,
    GRADIENT,
    LIKELIHOOD,
    REWARD,
    ROUND,
    SAMPLING,
    differing,
    lasting,
    recipe_of,
    result,
    train,
)

import gspo
from gspo.learner.reference import RefreshedReference
from gspo.recipe.schema import Recipe

NO_EVALUATION = "evaluation.num_queries=0"
PPO = ("actor.advantage=gae", "actor.importance_sampling_level=token", "actor.clip_low=0.2", "actor.clip_high=0.2")
KL = ("actor.kl={coefficient: 0.1}", NO_EVALUATION, "steps=2")
BFLOAT16 = ("model.dtype=bfloat16", "actor.gradient_checkpointing=true", "actor.micro_batch_tokens=300")


def newest(name: str = "broken") -> Path:
    return max(Path("runs", name, "checkpoints").iterdir())


def resumed_is_unbroken(recipe: Recipe, places: list[tuple[str, int]], broken_off: Callable[..., Any]) -> Any:
    """Break a run off at each place in turn; in the end it must be the one that never was."""
    whole = f"unbroken_{recipe.name}"
    unbroken = train(recipe.model_copy(update={"name": whole}))
    for place, count in places:
        broken_off(recipe, place, count, resume=recipe.run_dir.exists())
    outcome = train(recipe, resume=True)
    assert lasting(outcome.metrics) == lasting(unbroken.metrics)
    assert differing(result(recipe.name), result(whole)) == []
    return outcome


@pytest.mark.parametrize(("trunk", "precision"), [("own", BFLOAT16), ("shared", ())], ids=["own", "shared"])
def test_broken_off_with_a_value_model(trunk: str, precision: tuple[str, ...], broken_off: Callable[..., Any]) -> None:
    critic = f"critic={{trunk: {trunk}, optimizer: {{lr: 1e-2, schedule: cosine, warmup_steps: 1}}}}"
    places = [(APPRAISAL, 1), (LIKELIHOOD, 1), (GRADIENT, 4), (APPRAISAL, 2)]
    recipe = recipe_of("broken", *PPO, *precision, critic, NO_EVALUATION)
    outcome = resumed_is_unbroken(recipe, places, broken_off)
    state = load_file(newest() / "state.safetensors")
    assert state["critic/head.weight"].any()
    assert any(name.startswith("critic/trunk.") for name in state) == (trunk == "own")
    assert len(outcome.metrics) == 3


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / "model.safetensors"))


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_reference_is_the_policy_as_reinforcement_learning_begins_for_good(
    place: str, broken_off: Callable[..., Any]
) -> None:
    settings = (*KL, f"actor.kl.place={place}", "actor.advantage=group_mean")
    recipe, reference = recipe_of("broken", *settings), Path("runs/broken/cold_start/model")
    broken_off(recipe, SAMPLING, 1)  # after the cold start, before the first update
    begun, written = tensors(newest() / "model"), (reference / "model.safetensors").read_bytes()
    outcome = resumed_is_unbroken(recipe, [(APPRAISAL, 1), (GRADIENT, 3), (APPRAISAL, 1)], broken_off)
    assert same(tensors(reference), begun) and not same(begun, tensors(outcome.model))
    assert (reference / "model.safetensors").read_bytes() == written
    assert not list(Path("runs/broken").glob("unfinished*"))
    resumed_is_unbroken(recipe_of("untrained", *settings, "cold_start.steps=0"), [(GRADIENT, 3)], broken_off)


@pytest.mark.parametrize("damage", ["removed", "another", "cut off", "other shapes"])
def test_a_reference_that_is_not_the_runs_is_refused_and_the_run_goes_on_with_its_own(
    damage: str, broken_off: Callable[..., Any]
) -> None:
    recipe = recipe_of("broken", *KL, *PPO, "actor.kl.place=reward")
    train(recipe.model_copy(update={"name": "unbroken"}))
    broken_off(recipe, LIKELIHOOD, 2)
    reference = Path("runs/broken/cold_start/model")
    checkpoints = sorted(Path("runs/broken/checkpoints").rglob("*.json"))
    weights, before = reference / "model.safetensors", [path.read_bytes() for path in checkpoints]
    shutil.copytree(reference, "copy")
    if damage == "removed":
        shutil.rmtree(reference)
    elif damage == "cut off":
        weights.write_bytes(weights.read_bytes()[:-9])
    else:
        loaded = load_file(weights)
        name = "model.layers.0.mlp.down_proj.weight"
        loaded[name] = loaded[name] * (1 + 1e-6) if damage == "another" else loaded[name][:-1].clone()
        save_file(loaded, weights, {"format": "pt"})
    with pytest.raises(gspo.UserError, match="reference model") as caught:
        train(recipe, resume=True)
    assert "runs/broken/cold_start" in str(caught.value) and "restore it from a copy" in str(caught.value)
    assert [path.read_bytes() for path in checkpoints] == before
    if reference.exists():
        shutil.rmtree(reference)
    shutil.copytree("copy", reference)
    train(recipe, resume=True)
    assert differing(result("broken"), result("unbroken")) == []


def test_a_named_reference_that_has_changed_is_refused(broken_off: Callable[..., Any]) -> None:
    train(recipe_of("other", NO_EVALUATION, "steps=1"))
    weights = Path("runs/other/model/model.safetensors")
    recipe = recipe_of("broken", *KL, NO_EVALUATION, "actor.kl.reference=runs/other/model")
    broken_off(recipe, LIKELIHOOD, 2)
    loaded = load_file(weights)
    loaded["model.norm.weight"] = loaded["model.norm.weight"] * (1 + 1e-6)
    save_file(loaded, weights, {"format": "pt"})
    with pytest.raises(gspo.UserError, match="runs/other/model: the reference model is not the one the run began with"):
        train(recipe, resume=True)


def test_broken_off_in_a_second_pass_between_refreshes_of_a_reference(broken_off: Callable[..., Any]) -> None:
    experts = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, num_hidden_layers: 2"
    recipe = recipe_of(
        "broken",
        *("actor.epochs=2", "actor.kl={coefficient: 0.1, refresh_steps: 2, refresh_weight: 0.5}", NO_EVALUATION),
        "actor.optimizer={name: torch.optim.Muon, lr: 1e-2, schedule: linear, options: {momentum: 0.8}}",
        "model.dtype=bfloat16",
        *("model.frozen=['*.mlp.gate.weight']", "actor.routing_replay=policy", "actor.clip_fraction=0.2"),
        f"model.architecture={{model_type: qwen3_moe, hidden_size: 32, {experts}}}",
    )
    names = []

    def noting(*arguments: Any, **keywords: Any) -> None:
        names.append(Path(broken_off(*arguments, **keywords).model).parent.name)

    # Each mini-batch is of two parts. Step 3 is the first whose reference is neither the first policy nor the present.
    outcome = resumed_is_unbroken(recipe, [(GRADIENT, 5), (SAMPLING, 20), (GRADIENT, 5)], noting)
    assert names == ["step_000000_updated", "step_000002", "step_000002_updated"]
    state = load_file(newest() / "state.safetensors")
    reference = {name.removeprefix("reference/"): own for name, own in state.items() if name.startswith("reference/")}
    begun, done = (tensors(path) for path in (Path("runs/broken/cold_start/model"), outcome.model))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert reference["steps_taken"] == 1 and reference[name].dtype == torch.bfloat16
    assert not same({name: reference[name]}, {name: begun[name]})
    assert not same({name: reference[name]}, {name: done[name]})
    router = "model.layers.0.mlp.gate.weight"
    assert torch.equal(begun[router], done[router]) and f"optimizer/master/{router}" not in state
    assert [len(line["clip/token_fraction_by_mini_batch"]) for line in outcome.metrics] == [4] * 3
    assert outcome.metrics[-1]["policy/learning_rate"] == pytest.approx(1e-2 / 12)  # of the last of 12 updates
    lines = [json.loads(line) for line in Path("runs/broken/rollouts/step_000003.jsonl").read_text().splitlines()]
    assert {line["policy_version"] for line in lines} == {8} and {line["mini_batch"] for line in lines} <= {2, 3, None}


def test_a_reference_that_becomes_the_policy_is_at_no_distance_from_it() -> None:
    kl = "actor.kl={coefficient: 0.1, refresh_steps: 2}"
    outcome = train(recipe_of("refreshed", kl, NO_EVALUATION, "steps=5", "actor.optimizer={lr: 1e-2}"))
    first = [line["reference/kl_by_mini_batch"][0] for line in outcome.metrics]  # before any update of the step
    assert first[::2] == [0.0] * 3 and min(first[1::2]) > 1e-6


def test_an_error_once_a_reference_is_refreshed_saves_nothing_of_that_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ("actor.kl={coefficient: 0.1, refresh_steps: 2}", NO_EVALUATION, "checkpoint.every=1")
    train(recipe_of("unbroken", *settings))
    refresh = RefreshedReference.step

    def failing(reference: RefreshedReference, step: int) -> None:
        refresh(reference, step)
        if step == 2:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(RefreshedReference, "step", failing)
        with pytest.raises(ZeroDivisionError):
            train(recipe_of("broken", *settings))
    assert newest().name == "step_000001"
    train(recipe_of("broken", *settings), resume=True)
    assert differing(result("broken"), result("unbroken")) == []


DYNAMIC = ("rollout.dynamic_sampling=true", "rollout.max_rounds=3", "reward.0.options.pattern='7'", NO_EVALUATION)


@pytest.mark.parametrize("how", ["alone", "in rounds", "ahead"])
def test_broken_off_where_queries_are_drawn_by_their_difficulty(how: str, broken_off: Callable[..., Any]) -> None:
    ahead = ("rollout.max_staleness=1", "rollout.in_turn=true")
    keys = {"alone": (), "in rounds": DYNAMIC, "ahead": ahead}[how]
    fixed = ("queries.sampler=difficulty", "actor.entropy_bonus=1e-3", NO_EVALUATION)  # no mini-batch is empty
    recipe = recipe_of("broken", *fixed, *keys)
    outcome = resumed_is_unbroken(recipe, [(REWARD, 1), (GRADIENT, 3), (SAMPLING, 5)], broken_off)
    seen = [line["curriculum/seen_fraction"] for line in outcome.metrics]
    assert 0 < seen[0] < seen[-1] < 1
    rates = json.loads((newest() / "state.json").read_text())["pass_rates"]
    assert {step for _, step in rates.values()} <= {1, 2, 3}


def test_broken_off_in_a_round_of_dynamic_sampling_and_in_the_update_after_it(broken_off: Callable[..., Any]) -> None:
    recipe = recipe_of("broken", *DYNAMIC, "checkpoint.keep=1", "checkpoint.every=1")
    names, rests = [], []

    def noting(*arguments: Any, **keywords: Any) -> None:
        names.append(Path(broken_off(*arguments, **keywords).model).parent)
        rests.append(json.loads((names[-1] / "state.json").read_text())["ahead"])
        assert names[-1] == newest()  # the one just written is the newest, and kept

    places = [(ROUND, 2), (REWARD, 2), (GRADIENT, 3), (ROUND, 2), (LIKELIHOOD, 1)]
    resumed_is_unbroken(recipe, places, noting)
    assert [path.name.removeprefix("step_00000") for path in names] == ["0", "0", "0_updated", "2", "2_batch"]
    progress = json.loads((newest() / "state.json").read_text())
    assert progress["batches_drawn"] > progress["steps"]  # some of them in extra rounds
    assert any(rests)  # what was left of a batch


@pytest.mark.parametrize("keys", [(), DYNAMIC], ids=["all groups", "dynamic"])
def test_broken_off_with_groups_that_are_sampled_ahead(keys: tuple[str, ...], broken_off: Callable[..., Any]) -> None:
    ahead = ("rollout.max_staleness=2", "rollout.in_turn=true", "actor.old_logprobs=engine")
    recipe = recipe_of("broken", *keys, *ahead, "steps=5", NO_EVALUATION)
    places = [(SAMPLING, 12), (GRADIENT, 3), (SAMPLING, 14), (GRADIENT, 2), (REWARD, 1)]
    outcome = resumed_is_unbroken(recipe, places, broken_off)
    lines = [line for line in outcome.metrics if line["step"]]
    rates = [line["throughput/generated_tokens_per_second"] * line["time/total_seconds"] for line in lines]
    by_age = [line["staleness/tokens_by_age"] for line in lines]
    assert keys or rates == pytest.approx([sum(ages) for ages in by_age])  # also where a step has sampled nothing
    assert [len(ages) - 1 for ages in by_age] == ([0, 1, 2, 2, 2] if not keys else [len(own) - 1 for own in by_age])
    assert all(len(ages) <= 3 for ages in by_age) and not any(
        line["staleness/dropped_groups"] for line in outcome.metrics
    )


def test_broken_off_with_a_clip_range_that_sets_itself(broken_off: Callable[..., Any]) -> None:
    recipe = recipe_of("broken", "actor.clip_fraction=0.2", "actor.optimizer={lr: 1e-2}", NO_EVALUATION)
    resumed_is_unbroken(recipe, [(GRADIENT, 5), (SAMPLING, 1), (GRADIENT, 2)], broken_off)
    scale = json.loads((newest() / "state.json").read_text())["clip_scale"]
    assert len(scale) == 2 and scale[0] != 0
    train(recipe_of("unset", "actor.optimizer={lr: 1e-2}", NO_EVALUATION, "steps=2"))
    assert json.loads((newest("unset") / "state.json").read_text())["clip_scale"] is None
