"""The writer: when a checkpoint is due, that training goes on meanwhile, and what a failure leaves and says."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gspo.errors import RunError
from gspo.model.policy import Policy
from gspo.recipe.schema import CheckpointConfig
from gspo.run.checkpoint.position import Position, position_in_step
from gspo.run.checkpoint.random_state import random_state
from gspo.run.checkpoint.snapshot import Snapshot, digest_of, take_snapshot
from gspo.run.checkpoint.store import Store
from gspo.run.checkpoint.writer import Writer
from gspo.run.progress import Progress

SAMPLED = position_in_step(2, sampled=True, scored=False, num_updates=None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time.monotonic says, which is the only clock there is."""
    now = [1000.0]
    monkeypatch.setattr("gspo.run.checkpoint.writer.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def fake(position: Position, weights: Any = ()) -> Any:
    return SimpleNamespace(position=position, num_bytes=12_345, weights=weights)


@pytest.fixture
def writes(put: Callable[[Position], Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the writing of a snapshot: .error is raised by it, .written has the positions."""
    state = SimpleNamespace(error=None, written=[])

    def write(snapshot: Snapshot, store: Store) -> None:
        if state.error is not None:
            store.unfinished(snapshot.position).mkdir(parents=True)
            raise state.error
        put(snapshot.position)
        state.written.append(snapshot.position)

    monkeypatch.setattr("gspo.run.checkpoint.writer.write", write)
    return state


def save(writer: Writer, position: Position) -> None:
    writer.save(position, lambda: fake(position))


def test_every_so_many_whole_steps_one_is_due(store: Store, clock: list[float]) -> None:
    writer = Writer(store, CheckpointConfig(every=3, seconds=None))
    clock[0] += 1e9
    due = [
        Position(step, stage) for step in range(-1, 10) for stage in range(5) if writer.is_due(Position(step, stage))
    ]
    assert due == [Position(3), Position(6), Position(9)]


def test_so_many_seconds_after_the_last_one_is_due_wherever_the_run_is(
    store: Store, clock: list[float], writes: Any
) -> None:
    writer = Writer(store, CheckpointConfig(every=0, seconds=60.0))
    for position in (Position(-1, 2), Position(0), SAMPLED, Position(7)):
        clock[0] += 59.9
        assert not writer.is_due(position)
        clock[0] += 0.1
        assert writer.is_due(position)
        save(writer, position)
        assert not writer.is_due(position)
        writer.wait()
    assert writes.written == [Position(-1, 2), Position(0), SAMPLED, Position(7)]


def test_none_is_ever_due_where_neither_is_asked_for(store: Store, clock: list[float]) -> None:
    writer = Writer(store, CheckpointConfig(every=0, seconds=None))
    clock[0] += 1e9
    assert not any(writer.is_due(Position(step, stage)) for step in range(-1, 9) for stage in range(5))


def test_as_many_are_kept_as_the_recipe_says_and_only_once_the_new_one_is_whole(store: Store, writes: Any) -> None:
    writer = Writer(store, CheckpointConfig(keep=2))
    for step in (1, 2, 10):
        save(writer, Position(step))
    writer.wait()
    assert store.positions() == [Position(2), Position(10)]
    writes.error = OSError(errno.EIO, "Input/output error")
    save(writer, Position(11))
    with pytest.raises(RunError):
        writer.wait()
    assert store.positions() == [Position(2), Position(10)]


FAILURES = [
    (OSError(errno.ENOSPC, "No space left on device"), "no room: it needs about 12,345 bytes"),
    (OSError(errno.EFBIG, "File too large"), "no room"),
    (SafetensorError("Error: Os(..) (os error 28)"), "no room"),
    (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    (ZeroDivisionError("by none"), "ZeroDivisionError: by none"),
    (RunError("the weights are not finite"), "the weights are not finite"),
]


@pytest.mark.parametrize(("error", "said"), FAILURES, ids=[f"{type(e).__name__} {said[:8]}" for e, said in FAILURES])
def test_a_failure_is_said_once_at_the_next_safe_point_and_the_old_one_is_there(
    error: Exception, said: str, store: Store, writes: Any
) -> None:
    writer = Writer(store, CheckpointConfig(keep=1))
    save(writer, Position(1))
    writer.wait()
    writes.error = error
    save(writer, Position(2))  # does not fail itself: training is not to wait
    for thread in threading.enumerate():
        if thread.name == "checkpoint writer":
            thread.join()
    with pytest.raises(RunError) as caught:
        writer.raise_failure()
    message = str(caught.value)
    assert "the checkpoint of step 2 could not be written: " in message and said in message
    assert "step_000001, is untouched" in message and str(store.root) in message
    writer.raise_failure()
    writer.wait()
    assert [path.name for path in store.root.iterdir()] == ["step_000001"]  # no half of the new one
    found = store.newest()
    assert found is not None and found.path.name == "step_000001"
    writes.error = None
    save(writer, Position(2))
    writer.wait()
    assert store.positions() == [Position(2)]


def test_a_failure_is_said_before_the_next_one_is_begun(store: Store, writes: Any) -> None:
    writer = Writer(store, CheckpointConfig())
    store.root.mkdir()
    writes.error = OSError(errno.EIO, "Input/output error")
    save(writer, Position(1))
    with pytest.raises(RunError, match="there is no other"):
        writer.save(Position(2), lambda: pytest.fail("taken"))


def test_one_that_is_there_is_neither_taken_nor_written_again(store: Store, writes: Any) -> None:
    writer = Writer(store, CheckpointConfig())
    save(writer, SAMPLED)
    writer.save(SAMPLED, lambda: pytest.fail("taken"))
    writer.wait()
    assert writes.written == [SAMPLED]


def test_training_goes_on_while_one_is_written_which_is_of_the_weights_as_they_were(
    store: Store, new_policy: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gspo.run.checkpoint import writer as module

    policy, may_write, threads, original = new_policy(), threading.Event(), [], module.write

    def held_up(snapshot: Snapshot, store: Store) -> None:
        threads.append(threading.current_thread())
        assert may_write.wait(60)
        original(snapshot, store)

    def take() -> Snapshot:
        return take_snapshot(
            policy=policy,
            optimizer=None,
            progress=Progress(num_cold_steps=0, steps=1),
            random=random_state(),
            home=tmp_path,
            rollouts=(),
            log_bytes={},
            recipe="",
            about={},
        )

    monkeypatch.setattr(module, "write", held_up)
    expected = digest_of(policy.weights())
    writer = Writer(store, CheckpointConfig())
    writer.save(Position(1), take)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1)
    assert not store.path(Position(1)).exists()  # nothing has waited for it
    may_write.set()
    writer.wait()
    assert threads[0] is not threading.main_thread()
    assert threads[0].daemon  # a second signal must not wait for it
    assert digest_of(load_file(store.path(Position(1)) / "model" / "model.safetensors")) == expected


def test_the_next_one_waits_for_the_one_before(store: Store, monkeypatch: pytest.MonkeyPatch, put: Any) -> None:
    order = []

    def slow(snapshot: Snapshot, store: Store) -> None:
        order.append(f"begin {snapshot.position}")
        time.sleep(0.05)
        put(snapshot.position)
        order.append(f"end {snapshot.position}")

    monkeypatch.setattr("gspo.run.checkpoint.writer.write", slow)
    writer = Writer(store, CheckpointConfig())
    for step in (1, 2, 3):
        save(writer, Position(step))
    writer.wait()
    assert order == [f"{what} step {step}" for step in (1, 2, 3) for what in ("begin", "end")]
