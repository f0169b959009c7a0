"""The checkpointer: copies that the run cannot change, when they are due, and what a failed write leaves and says."""

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gspo.errors import RunError
from gspo.learner.optimizer import Optimizer
from gspo.learner.shares import OwnShare
from gspo.learner.state import digest_of, random_state, tensors_file, tensors_of
from gspo.learner.trainer import Trainer
from gspo.model.policy import Policy
from gspo.recipe.sections import CheckpointConfig, OptimizerConfig
from gspo.run.checkpoint import checkpointer as module
from gspo.run.checkpoint.checkpointer import Checkpointer, Snapshot
from gspo.run.checkpoint.store import STATE, DamagedError, Position, Store, seal, verified
from gspo.run.directory import RunDirectory
from gspo.run.progress import Clock, Progress
from gspo.types import Batch

NewPolicy = Callable[..., Policy]
BATCH, TENSORS = Position(2, 1), tensors_file(0)


def train_a_step(policy: Policy, optimizer: Optimizer) -> None:
    torch.stack([p.float().square().sum() for p in policy.model.parameters()]).sum().backward()
    assert optimizer.step().applied


def copies(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def tensors_in(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """All that is saved beside the weights."""
    return {**snapshot.share.tensors, **snapshot.tensors}


def progress_at(position: Position) -> Progress:
    batch = Batch(groups=()) if position.stage else None
    reports: Any = (None, None) if position.stage == 2 else ()
    return Progress(steps=position.steps, batch=batch, reports=reports)


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
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory(tmp_path)
    directory.recipe_text = "name: é\n"
    yield directory
    directory.close()


@pytest.fixture
def checkpointer_of(directory: RunDirectory, store: Store) -> Callable[..., Checkpointer]:
    """A checkpointer of a policy after step 3."""

    def build(policy: Any, optimizer: Optimizer | None = None, **settings: Any) -> Checkpointer:
        about = {"environment": {"torch": "2"}}
        trainer: Any = Trainer()
        trainer.policy, trainer._optimizer = policy, optimizer or SimpleNamespace(steps_taken=0)
        trainer._parts = {} if optimizer is None else {"optimizer": optimizer}
        return Checkpointer(
            store=store,
            settings=CheckpointConfig(**settings),
            trainer=trainer,
            directory=directory,
            clock=Clock(),
            about=about,
            progress=Progress(steps=3),
        )

    return build


def written(checkpointer: Checkpointer) -> Path:
    checkpointer.save()
    checkpointer.wait()
    return checkpointer.path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_copied_stays_while_the_policy_is_trained(dtype: str, trained: Any, checkpointer_of: Any) -> None:
    policy, optimizer = trained(dtype=dtype)
    checkpointer = checkpointer_of(policy, optimizer)
    snapshot = checkpointer._snapshot()
    weights, tensors, share = copies(snapshot.share.weights), copies(tensors_in(snapshot)), snapshot.share
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
    assert digest_of(share.weights) == digest_of(weights) != digest_of(policy.weights())
    of_now = tensors_in(checkpointer._snapshot())
    assert digest_of(tensors_in(snapshot)) == digest_of(tensors) != digest_of(of_now)


def test_what_is_saved_is_the_last_safe_point_though_random_numbers_are_drawn_and_lines_written_since(
    trained: Any, checkpointer_of: Any, directory: RunDirectory
) -> None:
    directory.append("metrics.jsonl", {"step": 3})
    checkpointer = checkpointer_of(*trained())
    expected = random_state()["torch"]
    torch.rand(9)
    directory.append("metrics.jsonl", {"step": 4})
    path = written(checkpointer)
    assert load_file(path / TENSORS)["random/torch"].equal(expected)
    assert [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()] == [3]


def test_the_state_is_whole_from_a_safe_point_to_the_next_optimiser_step(trained: Any, checkpointer_of: Any) -> None:
    policy, optimizer = trained()
    checkpointer = checkpointer_of(policy, optimizer)
    assert checkpointer.trainer.is_whole
    train_a_step(policy, optimizer)
    assert not checkpointer.trainer.is_whole
    checkpointer.note(Progress(steps=4))
    assert checkpointer.trainer.is_whole


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "qwen3_moe", "gpt_oss"])
def test_the_model_of_a_checkpoint_loads_and_is_the_policy_tied_weights_once(
    family: str, trained: Any, checkpointer_of: Any
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tied = family in ("gpt2", "gemma2")
    policy, optimizer = trained(family, tie_word_embeddings=tied)
    checkpointer = checkpointer_of(policy, optimizer)
    snapshot = checkpointer._snapshot()
    expected, ids = copies(policy.model.state_dict()), torch.tensor([[3, 7, 5, 4]])
    logits = policy.model(input_ids=ids).logits
    train_a_step(policy, optimizer)
    checkpointer._write(snapshot)
    model = AutoModelForCausalLM.from_pretrained(checkpointer.path / "model").eval()
    assert digest_of(model.state_dict()) == digest_of(expected)
    assert torch.equal(model(input_ids=ids).logits, logits)
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (output.data_ptr() == embedding.data_ptr()) == tied
    assert (checkpointer.path / "model" / "model.safetensors").stat().st_size < 4 * policy.num_parameters + 20_000
    assert len(AutoTokenizer.from_pretrained(checkpointer.path / "model")) == len(policy.tokenizer)


def test_tied_weights_are_one_tensor_in_the_copy(new_policy: NewPolicy) -> None:
    weights = new_policy("gpt2").weights()
    assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
    apart = new_policy("qwen3", tie_word_embeddings=False).weights()
    assert len({tensor.data_ptr() for tensor in apart.values()}) == len(apart)


def test_a_checkpoint_holds_all_that_was_given_and_of_the_logs_what_belongs_to_it(
    trained: Any, checkpointer_of: Any, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text("one\n")
    checkpointer = checkpointer_of(*trained())
    snapshot = checkpointer._snapshot()
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\nthree\n")
    checkpointer._write(snapshot)
    path = checkpointer.path
    assert path.name == "step_000003" and [entry.name for entry in store.root.iterdir()] == [path.name]
    content = verified(path)
    assert content["environment"] == {"torch": "2"}
    assert content["weights_sha256"] == digest_of(snapshot.share.weights)
    assert (path / "metrics.jsonl").read_text() == "one\n"
    assert (path / "recipe.yaml").read_text(encoding="utf-8") == "name: é\n"
    assert json.loads((path / STATE).read_text())["steps"] == 3
    assert digest_of(load_file(path / TENSORS)) == digest_of(tensors_in(snapshot))
    size = sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
    assert 0.5 * size < snapshot.num_bytes <= size


def test_tensors_are_written_bit_by_bit_whatever_their_layout(checkpointer_of: Any, new_policy: NewPolicy) -> None:
    tensors = {
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "none": torch.tensor(float("nan"), dtype=torch.float64),
        "whole": torch.tensor([2**62 + 1]),
    }
    checkpointer = checkpointer_of(new_policy())
    checkpointer.trainer._parts["a"] = SimpleNamespace(state=lambda: tensors)
    path = written(checkpointer)
    assert digest_of(tensors_of(path, "a")) == digest_of(tensors)


def test_one_bit_or_a_missing_file_of_a_whole_checkpoint_is_found(
    trained: Any, checkpointer_of: Any, flip: Any
) -> None:
    path = written(checkpointer_of(*trained()))
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
    bad: float, new_policy: NewPolicy, checkpointer_of: Any, store: Store
) -> None:
    policy = new_policy(dtype="bfloat16")
    with torch.no_grad():
        list(policy.model.parameters())[-1].view(-1)[-1] = bad
    with pytest.raises(RunError, match="not finite"):
        written(checkpointer_of(policy))
    assert store.positions() == []


def test_what_does_not_read_back_as_it_was_written_is_said(
    trained: Any, checkpointer_of: Any, store: Store, flip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_bad_disk(unfinished: Path, about: Any) -> None:
        seal(unfinished, about)
        flip(unfinished / TENSORS, 4001)

    monkeypatch.setattr(module, "seal", on_a_bad_disk)
    with pytest.raises(RunError, match=f"could not be written: {TENSORS} is not as it was written"):
        written(checkpointer_of(*trained()))
    assert store.positions() == []  # it never counts


def test_what_an_earlier_try_left_is_not_mixed_in(trained: Any, checkpointer_of: Any, store: Store) -> None:
    checkpointer = checkpointer_of(*trained())
    rest = store.unfinished(Position(3)) / "model"
    rest.mkdir(parents=True)
    (rest / "model-00001-of-00002.safetensors").write_text("half")
    assert not (written(checkpointer) / "model" / "model-00001-of-00002.safetensors").exists()


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time.monotonic says, which is the only clock there is."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def writes(put: Callable[[Position], Path], store: Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the writing of a snapshot: .error is raised by it, .written has the positions."""
    state = SimpleNamespace(error=None, written=[])

    def write(_: Checkpointer, snapshot: Snapshot) -> None:
        if state.error is not None:
            store.unfinished(snapshot.position).mkdir(parents=True)
            raise state.error
        put(snapshot.position)
        state.written.append(snapshot.position)

    def take(checkpointer: Checkpointer) -> Any:
        share = OwnShare(weights={}, tensors={}, number=1)
        return SimpleNamespace(position=checkpointer.progress.position, num_bytes=12_345, share=share)

    monkeypatch.setattr(Checkpointer, "_write", write)
    monkeypatch.setattr(Checkpointer, "_snapshot", take)
    return state


def save(checkpointer: Checkpointer, position: Position) -> None:
    checkpointer.note(progress_at(position))
    checkpointer.save()


def test_every_so_many_whole_steps_one_is_due(checkpointer_of: Any, clock: list[float], writes: Any) -> None:
    checkpointer = checkpointer_of(None, every=3, seconds=None, keep=99)
    clock[0] += 1e9
    for step in range(10):
        for stage in range(3):
            checkpointer.safe_point(progress_at(Position(step, stage)))
    checkpointer.wait()
    assert writes.written == [Position(3), Position(6), Position(9)]


def test_so_many_seconds_after_the_last_one_is_due_wherever_the_run_is(
    checkpointer_of: Any, clock: list[float], writes: Any
) -> None:
    checkpointer = checkpointer_of(None, every=0, seconds=60.0)
    positions = [Position(0), BATCH, Position(2, 2), Position(7)]
    for number, position in enumerate(positions):
        clock[0] += 59.9
        checkpointer.safe_point(progress_at(position))
        assert len(writes.written) == number
        clock[0] += 0.1
        checkpointer.safe_point(progress_at(position))
        checkpointer.wait()
        assert len(writes.written) == number + 1
    assert writes.written == positions


def test_none_is_ever_due_where_neither_is_asked_for(checkpointer_of: Any, clock: list[float], writes: Any) -> None:
    checkpointer = checkpointer_of(None, every=0, seconds=None)
    clock[0] += 1e9
    for step in range(9):
        for stage in range(3):
            checkpointer.safe_point(progress_at(Position(step, stage)))
    checkpointer.wait()
    assert writes.written == []


def test_as_many_are_kept_as_the_recipe_says_and_only_once_the_new_one_is_whole(
    checkpointer_of: Any, store: Store, writes: Any
) -> None:
    checkpointer = checkpointer_of(None, keep=2)
    for step in (1, 2, 10):
        save(checkpointer, Position(step))
    checkpointer.wait()
    assert store.positions() == [Position(2), Position(10)]
    writes.error = OSError(errno.EIO, "Input/output error")
    save(checkpointer, Position(11))
    with pytest.raises(RunError):
        checkpointer.wait()
    assert store.positions() == [Position(2), Position(10)]


FAILURES = [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    (SafetensorError("Error: Os(..) (os error 28)"), "(os error 28)"),
    (ZeroDivisionError("by none"), "ZeroDivisionError: by none"),
    (RunError("the weights are not finite"), "written: the weights are not finite"),
]


@pytest.mark.parametrize(("error", "said"), FAILURES, ids=[f"{type(e).__name__} {said[:8]}" for e, said in FAILURES])
def test_a_failure_is_said_once_at_the_next_safe_point_and_the_old_one_is_there(
    error: Exception, said: str, checkpointer_of: Any, store: Store, writes: Any
) -> None:
    checkpointer = checkpointer_of(None, keep=1, every=0)
    save(checkpointer, Position(1))
    checkpointer.wait()
    writes.error = error
    save(checkpointer, Position(2))  # does not fail itself: training is not to wait
    for thread in threading.enumerate():
        if thread.name == "checkpoint writer":
            thread.join()
    with pytest.raises(RunError) as caught:
        checkpointer.safe_point(progress_at(Position(2, 1)))
    message = str(caught.value)
    assert "the checkpoint of step 2 could not be written: " in message and said in message
    assert "it needs about 12,345 bytes" in message
    assert "step_000001, is untouched" in message and str(store.root) in message
    checkpointer.safe_point(progress_at(Position(2)))
    checkpointer.wait()
    assert [path.name for path in store.root.iterdir()] == ["step_000001"]  # no half of the new one
    newest = store.newest()
    assert newest is not None and newest.path.name == "step_000001"
    writes.error = None
    save(checkpointer, Position(2))
    checkpointer.wait()
    assert store.positions() == [Position(2)]


def test_a_failure_is_said_before_the_next_one_is_begun(checkpointer_of: Any, store: Store, writes: Any) -> None:
    checkpointer = checkpointer_of(None)
    store.root.mkdir()
    writes.error = OSError(errno.EIO, "Input/output error")
    save(checkpointer, Position(1))
    writes.error = None
    with pytest.raises(RunError, match="there is no other"):
        save(checkpointer, Position(2))
    assert writes.written == []


def test_one_that_is_there_is_neither_taken_nor_written_again(checkpointer_of: Any, writes: Any) -> None:
    checkpointer = checkpointer_of(None)
    save(checkpointer, BATCH)
    checkpointer.wait()
    save(checkpointer, BATCH)
    checkpointer.wait()
    assert writes.written == [BATCH]


def test_training_goes_on_while_one_is_written_which_is_of_the_weights_as_they_were(
    checkpointer_of: Any, new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, may_write, threads, original = new_policy(), threading.Event(), [], Checkpointer._write

    def held_up(checkpointer: Checkpointer, snapshot: Snapshot) -> None:
        threads.append(threading.current_thread())
        assert may_write.wait(60)
        original(checkpointer, snapshot)

    monkeypatch.setattr(Checkpointer, "_write", held_up)
    expected = digest_of(policy.weights())
    checkpointer = checkpointer_of(policy)
    checkpointer.save()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1)
    assert not checkpointer.path.exists()  # nothing has waited for it
    may_write.set()
    checkpointer.wait()
    assert threads[0] is not threading.main_thread()
    assert threads[0].daemon  # a second signal must not wait for it
    assert digest_of(load_file(checkpointer.path / "model" / "model.safetensors")) == expected


def test_the_next_one_waits_for_the_one_before(
    checkpointer_of: Any, writes: Any, monkeypatch: pytest.MonkeyPatch, put: Any
) -> None:
    order = []

    def slow(_: Checkpointer, snapshot: Snapshot) -> None:
        order.append(f"begin {snapshot.position}")
        time.sleep(0.05)
        put(snapshot.position)
        order.append(f"end {snapshot.position}")

    monkeypatch.setattr(Checkpointer, "_write", slow)
    checkpointer = checkpointer_of(None)
    for step in (1, 2, 3):
        save(checkpointer, Position(step))
    checkpointer.wait()
    assert order == [f"{what} step {step}" for step in (1, 2, 3) for what in ("begin", "end")]
