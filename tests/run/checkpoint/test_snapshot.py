"""A snapshot: a copy that the run cannot change, written as a model that loads and a state that is found damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.errors import RunError
from gspo.learner.optimizer import Optimizer
from gspo.model.policy import Policy
from gspo.recipe.schema import OptimizerConfig
from gspo.run.checkpoint.files import DamagedError, seal, verified
from gspo.run.checkpoint.random_state import random_state
from gspo.run.checkpoint.snapshot import STATE, TENSORS, Snapshot, digest_of, take_snapshot, write
from gspo.run.checkpoint.store import Store
from gspo.run.progress import Progress

NewPolicy = Callable[..., Policy]


def train_a_step(policy: Policy, optimizer: Optimizer) -> None:
    torch.stack([p.float().square().sum() for p in policy.model.parameters()]).sum().backward()
    assert optimizer.step().applied


def copies(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture
def trained(new_policy: NewPolicy) -> Callable[..., tuple[Policy, Optimizer]]:
    """A policy and its optimiser after a step."""

    def build(family: str = "qwen3", **settings: Any) -> tuple[Policy, Optimizer]:
        policy = new_policy(family, **settings)
        optimizer = Optimizer(policy.model, OptimizerConfig(lr=1e-2), total_steps=9)
        train_a_step(policy, optimizer)
        return policy, optimizer

    return build


@pytest.fixture
def take(tmp_path: Path) -> Callable[..., Snapshot]:
    """A snapshot of a policy after step 3."""
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")

    def build(policy: Policy, optimizer: Optimizer | None = None) -> Snapshot:
        return take_snapshot(
            policy=policy,
            optimizer=optimizer,
            progress=Progress(num_cold_steps=0, steps=3),
            random=random_state(),
            home=tmp_path,
            rollouts=(),
            log_bytes={"metrics.jsonl": 4},
            recipe="name: é\n",
            about={"environment": {"torch": "2"}},
        )

    return build


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_copied_stays_while_the_policy_is_trained(dtype: str, trained: Any, take: Any) -> None:
    policy, optimizer = trained(dtype=dtype)
    snapshot = take(policy, optimizer)
    weights, tensors = copies(snapshot.weights), copies(snapshot.tensors)
    assert {name.partition("/")[0] for name in tensors} == {"optimizer", "random"}  # no record has a tensor here
    names = [name for name, _ in policy.model.named_parameters()]
    kept = {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype == "bfloat16" else set())
    assert {f"optimizer/{key}/{name}" for key in kept for name in names} | {"optimizer/steps_taken"} == {
        name for name in tensors if name.startswith("optimizer/")
    }
    for _ in range(3):
        train_a_step(policy, optimizer)
    random_state()["torch"].zero_()
    torch.rand(9)
    assert digest_of(snapshot.weights) == digest_of(weights) != digest_of(policy.weights())
    assert digest_of(snapshot.tensors) == digest_of(tensors) != digest_of(take(policy, optimizer).tensors)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "qwen3_moe", "gpt_oss"])
def test_the_model_of_a_checkpoint_loads_and_is_the_policy_tied_weights_once(
    family: str, trained: Any, take: Any, store: Store
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tied = family in ("gpt2", "gemma2")
    policy, optimizer = trained(family, tie_word_embeddings=tied)
    snapshot = take(policy, optimizer)
    expected, ids = copies(policy.model.state_dict()), torch.tensor([[3, 7, 5, 4]])
    logits = policy.model(input_ids=ids).logits
    train_a_step(policy, optimizer)
    write(snapshot, store)
    model = AutoModelForCausalLM.from_pretrained(store.path(snapshot.position) / "model").eval()
    assert digest_of(model.state_dict()) == digest_of(expected)
    assert torch.equal(model(input_ids=ids).logits, logits)
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (output.data_ptr() == embedding.data_ptr()) == tied
    size = (store.path(snapshot.position) / "model" / "model.safetensors").stat().st_size
    assert size < 4 * policy.num_parameters + 20_000
    assert len(AutoTokenizer.from_pretrained(store.path(snapshot.position) / "model")) == len(policy.tokenizer)


def test_tied_weights_are_one_tensor_in_the_copy(new_policy: NewPolicy) -> None:
    weights = new_policy("gpt2").weights()
    assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
    apart = new_policy("qwen3", tie_word_embeddings=False).weights()
    assert len({tensor.data_ptr() for tensor in apart.values()}) == len(apart)


def test_a_checkpoint_holds_all_that_was_given_and_of_the_logs_what_belongs_to_it(
    trained: Any, take: Any, store: Store, tmp_path: Path
) -> None:
    snapshot = take(*trained())
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\nthree\n")
    write(snapshot, store)
    path = store.path(snapshot.position)
    assert path.name == "step_000003" and [entry.name for entry in store.root.iterdir()] == [path.name]
    content = verified(path)
    assert content["environment"] == {"torch": "2"} and content["weights_sha256"] == digest_of(snapshot.weights)
    assert (path / "metrics.jsonl").read_text() == "one\n"
    assert (path / "recipe.yaml").read_text(encoding="utf-8") == "name: é\n"
    assert json.loads((path / STATE).read_text())["steps"] == 3
    assert digest_of(load_file(path / TENSORS)) == digest_of(snapshot.tensors)
    size = sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
    assert 0.5 * size < snapshot.num_bytes <= size


def test_one_bit_or_a_missing_file_of_a_whole_checkpoint_is_found(
    trained: Any, take: Any, store: Store, flip: Any
) -> None:
    snapshot = take(*trained())
    write(snapshot, store)
    path = store.path(snapshot.position)
    files = [entry for entry in path.rglob("*") if entry.is_file()]
    assert len(files) >= 8
    for entry in files:
        bits = 8 * entry.stat().st_size
        for bit in (0, bits // 3, bits - 1):
            flip(entry, bit)
            with pytest.raises(DamagedError, match=entry.name):
                verified(path)
            flip(entry, bit)
        entry.rename(path.parent / "away")
        with pytest.raises(DamagedError, match=f"{entry.name} is missing"):
            verified(path)
        (path.parent / "away").rename(entry)
    verified(path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_written(
    bad: float, new_policy: NewPolicy, take: Any, store: Store
) -> None:
    policy = new_policy(dtype="bfloat16")
    with torch.no_grad():
        list(policy.model.parameters())[-1].view(-1)[-1] = bad
    with pytest.raises(RunError, match="not finite"):
        write(take(policy), store)
    assert store.positions() == []


def test_what_does_not_read_back_as_it_was_written_is_said(
    trained: Any, take: Any, store: Store, flip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_bad_disk(unfinished: Path, about: Any) -> None:
        seal(unfinished, about)
        flip(unfinished / TENSORS, 4001)

    monkeypatch.setattr("gspo.run.checkpoint.snapshot.seal", on_a_bad_disk)
    with pytest.raises(DamagedError, match=TENSORS):
        write(take(*trained()), store)
    assert store.positions() == []  # it never counts


def test_what_an_earlier_try_left_is_not_mixed_in(trained: Any, take: Any, store: Store) -> None:
    snapshot = take(*trained())
    rest = store.unfinished(snapshot.position) / "model"
    rest.mkdir(parents=True)
    (rest / "model-00001-of-00002.safetensors").write_text("half")
    write(snapshot, store)
    assert not (store.path(snapshot.position) / "model" / "model-00001-of-00002.safetensors").exists()


def test_a_digest_is_that_of_every_bit_name_and_shape() -> None:
    def weights() -> dict[str, torch.Tensor]:
        return {"a": torch.tensor([[0.0, 1.0], [2.0, float("nan")]]), "b": torch.tensor(3, dtype=torch.bfloat16)}

    digest = digest_of(weights())
    assert digest_of(dict(reversed(weights().items()))) == digest
    assert digest_of({**weights(), "a": weights()["a"].T.contiguous().T}) == digest
    others = [
        {**weights(), "a": weights()["a"].T},
        {**weights(), "a": weights()["a"].reshape(4)},
        {**weights(), "a": -weights()["a"].neg().mul(-1)},  # -0.0
        {**weights(), "b": torch.tensor(3, dtype=torch.float16)},
        {"b": weights()["a"], "a": weights()["b"]},
        {"a": weights()["a"]},
        {**weights(), "c": torch.empty(0)},
    ]
    for bit in range(8 * 16):
        tensor = weights()["a"]
        tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        others.append({**weights(), "a": tensor})
    assert len({digest, *map(digest_of, others)}) == len(others) + 1
