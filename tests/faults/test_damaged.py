"""Faults 6 to 11, 16, 18 and 19: disks that are full or lie, writes that fail, numbers that are none, other recipes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.laboratory import Fault, Laboratory, differing

Unbroken = Callable[..., dict[str, Any]]
STOPPED = "step_000002_updated"  # a checkpoint with everything in it


@pytest.fixture
def broken_off(laboratory: Laboratory) -> Laboratory:
    """A run that a signal has ended within a step; the checkpoint before is of a whole step."""
    fault = ("signal_at", {"place": "optimizer step", "count": 8, "number": 15})
    assert laboratory.train(fault=fault) == 143, laboratory.said
    assert laboratory.checkpoints() == ["step_000002", STOPPED]
    return laboratory


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def test_a_checkpoint_holds_what_it_says(broken_off: Laboratory) -> None:
    assert files_of(broken_off.run / "checkpoints" / STOPPED) == [
        "cold_start.jsonl",
        "manifest.json",
        "metrics.jsonl",
        "model/config.json",
        "model/generation_config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "recipe.yaml",
        "state.json",
        "state.safetensors",
    ]


def test_one_flipped_bit_in_any_file_is_found_and_the_checkpoint_before_it_taken(
    broken_off: Laboratory, unbroken: Unbroken
) -> None:
    for name in files_of(broken_off.run / "checkpoints" / STOPPED):
        again = broken_off.beside(name.replace("/", "_"))
        shutil.copytree(broken_off.run, again.run)
        again.flip(f"checkpoints/{STOPPED}/{name}")
        assert again.resume() == 0, (name, again.said)
        assert f"passed over {STOPPED}: {name}" in again.said, (name, again.said)
        assert "run/checkpoints/step_000002: step 2" in again.said
        assert f"damaged_{STOPPED}" in again.checkpoints()
        assert not differing(without_damaged(again), unbroken()), name


def without_damaged(laboratory: Laboratory) -> dict[str, Any]:
    for entry in (laboratory.run / "checkpoints").glob("damaged_*"):
        shutil.rmtree(entry)
    return laboratory.result()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("model/model.safetensors", truncate, "bytes, not"),
        ("state.safetensors", truncate, "bytes, not"),
        ("manifest.json", lambda path: path.write_text(""), "cannot be read"),
        ("manifest.json", Path.unlink, "is missing"),
        ("state.json", Path.unlink, "is missing"),
        ("model/config.json", Path.unlink, "is missing"),
    ],
)
def test_a_truncated_an_emptied_or_a_missing_file_is_found(
    name: str, harm: Callable[[Path], None], words: str, broken_off: Laboratory, unbroken: Unbroken
) -> None:
    harm(broken_off.run / "checkpoints" / STOPPED / name)
    assert broken_off.resume() == 0, broken_off.said
    assert f"passed over {STOPPED}: {name}" in broken_off.said
    assert words in broken_off.said
    assert not differing(without_damaged(broken_off), unbroken())


@pytest.mark.parametrize("command", [("resume", "run"), ("train", "run.yaml", "--resume")])
def test_where_no_checkpoint_is_whole_nothing_is_begun_and_nothing_touched(
    command: tuple[str, ...], broken_off: Laboratory
) -> None:
    for name in broken_off.checkpoints():
        broken_off.flip(f"checkpoints/{name}/state.safetensors")
    before = {path: path.read_bytes() for path in broken_off.run.rglob("*") if path.is_file() and path.name != "lock"}
    assert broken_off.start(*command).wait() == 2
    for words in ("no checkpoint is whole", "step_000002:", f"{STOPPED}:", "fix:"):
        assert words in broken_off.said
    assert before == {path: path.read_bytes() for path in before}
    assert broken_off.checkpoints() == ["step_000002", STOPPED]


def test_a_full_disk_ends_the_run_with_the_room_it_needs_and_the_checkpoint_before_is_whole(
    laboratory: Laboratory, unbroken: Unbroken
) -> None:
    assert laboratory.train(fault=("no_room", {"num_bytes": 30_000, "count": 8})) == 1
    assert "it needs about" in laboratory.said and "are free" in laboratory.said
    assert laboratory.checkpoints() == ["step_000001", "step_000002"]
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_a_write_that_fails_is_raised_at_the_next_safe_point(laboratory: Laboratory, unbroken: Unbroken) -> None:
    assert laboratory.train(fault=("fail_at", {"place": "publish", "count": 3})) == 1
    assert "the checkpoint of step 2 could not be written" in laboratory.said
    assert "Input/output error" in laboratory.said and "step_000001, is untouched" in laboratory.said
    assert "Traceback" not in laboratory.said
    assert not any(name.startswith("unfinished") for name in laboratory.checkpoints(unfinished=True))
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_updates_that_are_not_finite_are_skipped_and_too_many_end_the_run_which_may_be_tried_again(
    laboratory: Laboratory,
) -> None:
    assert laboratory.train("steps=6", fault=("nan_gradients", {"first": 6, "last": 12})) == 1
    assert "not finite in 5 updates in a row" in laboratory.said
    lines = laboratory.lines()
    assert [line["policy/skipped_updates"] for line in lines[1:]] == [0, 2, 2, 2]
    assert laboratory.checkpoints()[-1] == "step_000003"  # not the state that has no way on
    assert laboratory.resume() == 0, laboratory.said  # without the fault
    assert [line["step"] for line in laboratory.lines()] == list(range(7))


def test_weights_that_are_not_finite_are_never_saved_over_whole_ones(
    laboratory: Laboratory, unbroken: Unbroken
) -> None:
    assert laboratory.train(fault=("broken_weights", {"count": 8})) == 1
    assert "not finite" in laboratory.said
    assert laboratory.checkpoints()[-1] == "step_000002", laboratory.said
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_another_recipe_is_refused_with_what_differs(broken_off: Laboratory, unbroken: Unbroken) -> None:
    assert broken_off.resume("seed=1", "actor.optimizer.lr=0.5", "checkpoint.keep=1") == 2
    for words in ("seed was 0, is 1", "actor.optimizer.lr was 0.01, is 0.5", "model.path=run/checkpoints/"):
        assert words in broken_off.said
    assert "checkpoint.keep was" not in broken_off.said
    assert broken_off.resume("checkpoint.keep=3", "evaluation.every=0", "evaluation.every=2") == 0, broken_off.said
    assert "checkpoint.keep was 2, is 3" in broken_off.said
    assert not differing(broken_off.result(), unbroken())


def test_other_queries_are_refused(broken_off: Laboratory) -> None:
    rows = broken_off.home / "rows.jsonl"
    rows.write_text(rows.read_text().replace("dog", "cat"))
    assert broken_off.resume() == 2
    assert "queries" in broken_off.said and "fix:" in broken_off.said


def test_a_directory_that_cannot_be_written_is_said_before_any_work_and_nothing_is_lost(
    laboratory: Laboratory, unbroken: Unbroken
) -> None:
    privileges: Fault = ("without_privileges", {})
    (laboratory.home / "locked").mkdir(mode=0o555)
    assert laboratory.train("output_dir=locked/run", fault=privileges) == 2
    assert "locked" in laboratory.said and "fix:" in laboratory.said
    kill: Fault = ("signal_at", {"place": "optimizer step", "count": 8, "saved": True})
    assert laboratory.train(fault=kill) == -9
    (laboratory.run / "lock").chmod(0o444)
    (laboratory.run / "checkpoints").chmod(0o555)
    laboratory.run.chmod(0o555)
    assert laboratory.resume(fault=privileges) == 2
    assert "cannot be written" in laboratory.said and "fix:" in laboratory.said
    laboratory.run.chmod(0o755)
    (laboratory.run / "lock").chmod(0o644)
    assert laboratory.resume(fault=privileges) == 1  # the run's directory is writable again, its checkpoints are not
    assert "could not be written" in laboratory.said and "Permission denied" in laboratory.said
    (laboratory.run / "checkpoints").chmod(0o755)
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


def test_a_damaged_record_of_rollouts_does_no_harm_and_the_training_goes_on_bit_by_bit(
    broken_off: Laboratory, unbroken: Unbroken
) -> None:
    broken_off.flip("rollouts/step_000001.jsonl")
    (broken_off.run / "rollouts" / "step_000002.jsonl").unlink()
    assert broken_off.resume() == 0, broken_off.said
    different = differing(broken_off.result(), unbroken())
    assert different == ["rollouts/step_000001.jsonl", "rollouts/step_000002.jsonl"]
