"""A run's directory read from outside: what state it is in, what of it cannot be read, what is no run."""

import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.report.run_files import RunFiles, read_run
from gspo.run.lock import Lock

pytestmark = pytest.mark.usefixtures("own_directory")

RECIPE = "name: mine\nsteps: 5\nmodel: {path: x}\n"
Writing = Callable[..., RunFiles]


@pytest.fixture
def written(tmp_path: Path) -> Writing:
    """A run with these files, read."""

    def write(recipe: str = RECIPE, **files: str) -> RunFiles:
        path = Path("runs", "a")
        path.mkdir(parents=True, exist_ok=True)
        (path / "recipe.yaml").write_text(recipe, encoding="utf-8")
        for name, content in files.items():
            (path / f"{name}.jsonl").write_text(content, encoding="utf-8")
        return read_run(path)

    return write


def text(*lines: Any) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def beginning(*, seconds_ago: float = 0.0, **changes: Any) -> dict[str, Any]:
    time = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat(timespec="seconds")
    return {"time": time, "event": "begun", "process": os.getpid(), "host": socket.gethostname(), **changes}


@pytest.fixture
def lock() -> Iterator[Lock]:
    """That of the run, which this process holds."""
    Path("runs", "a").mkdir(parents=True)
    lock = Lock(Path("runs", "a"))
    yield lock
    lock.release()


def ending(how: str) -> dict[str, Any]:
    return {"time": "2026-01-01T00:00:00+00:00", "event": "ended", "how": how, "reason": None}


def test_a_run_that_has_written_its_end_is_in_that_state(written: Writing) -> None:
    for how in ("finished", "stopped", "interrupted", "failed"):
        assert written(history=text(beginning(), ending(how))).state == how


def test_a_run_whose_lock_is_held_is_running_and_one_whose_is_not_was_killed(written: Writing, lock: Lock) -> None:
    assert written(history=text(beginning())).state == "running"
    assert written(history=text(beginning(event="resumed"))).state == "running"
    lock.release()
    assert written(history=text(beginning())).state == "killed"  # though this process is there
    Path("runs", "a", "lock").unlink()
    assert written(history=text(beginning())).state == "killed"


def test_only_the_last_process_counts(written: Writing, lock: Lock) -> None:
    assert written(history=text(beginning(), beginning(event="resumed"))).state == "running"
    assert written(history=text(beginning(), ending("failed"))).state == "failed"
    lock.release()
    assert written(history=text(beginning(), ending("failed"), beginning(event="resumed"))).state == "killed"


def test_an_end_that_is_still_being_written_is_none_yet(written: Writing, lock: Lock) -> None:
    assert written(history=text(beginning()) + text(ending("finished"))[:-1]).state == "running"


def test_of_a_process_on_another_machine_nothing_is_known_unless_it_holds_the_lock(
    written: Writing, lock: Lock
) -> None:
    assert written(history=text(beginning(host="elsewhere"))).state == "running"  # on a disk that both have
    lock.release()
    assert written(history=text(beginning(host="elsewhere"))).state == "unknown"
    assert written(history=text(beginning(host="elsewhere"), ending("finished"))).state == "finished"


@pytest.mark.parametrize("history", [None, ""])
def test_a_history_that_says_nothing_leaves_the_state_unknown(history: str | None, written: Writing) -> None:
    assert written(**({} if history is None else {"history": history})).state == "unknown"


def test_a_line_that_is_being_written_is_neither_read_nor_missed(written: Writing) -> None:
    run = written(metrics=text({"step": 1, "x": 1.5}) + '{"step": 2, "x"')
    assert [line["step"] for line in run.lines] == [1]
    assert run.notes == []


def test_lines_that_are_none_are_left_out_and_counted(written: Writing, lock: Lock) -> None:
    good = [text({"step": step}) for step in (1, 2, 3)]
    bad = ["{broken\n", "[1]\n", "\x00\x00\n", "\n"]
    run = written(metrics=good[0] + "".join(bad) + good[1] + good[2], history="\x00\x00\n" + text(beginning()))
    assert [line["step"] for line in run.lines] == [1, 2, 3]
    assert run.notes == ["3 line(s) of metrics.jsonl could not be read", "1 line(s) of history.jsonl could not be read"]
    assert run.state == "running"


def test_of_lines_of_one_step_the_last_holds_and_nothing_is_unreadable_about_the_others(written: Writing) -> None:
    run = written(metrics=text({"step": 2, "x": 1}, {"step": 1, "x": 2}, {"step": 2, "x": 3}))
    assert [(line["step"], line["x"]) for line in run.lines] == [(1, 2), (2, 3)]
    assert run.notes == []


def test_null_is_read_as_nan_in_lists_too_and_line_0_is_no_step(written: Writing) -> None:
    run = written(metrics=text({"step": 0, "e": 1}, {"step": 1, "x": None, "y": [1, [None]]}))
    assert math.isnan(run.steps[0]["x"]) and math.isnan(run.steps[0]["y"][1][0])
    assert [line["step"] for line in run.steps] == [1]
    assert run.num_steps == 1


def test_a_run_that_has_just_begun_has_nothing_yet(written: Writing) -> None:
    run = written(RECIPE + "flux: {capacitor: 3}\n")  # of another version
    assert run.recipe["flux"] == {"capacitor": 3}
    assert (run.lines, run.cold_start, run.history, run.num_steps, run.notes) == ([], [], [], 0, [])
    assert dict(run.rollout_files) == {} and run.last("begun") == {}
    assert run.name == "mine" and run.path == Path("runs/a")


def test_the_last_event_of_a_kind_is_found(written: Writing) -> None:
    run = written(history=text(beginning(step=1), ending("failed"), beginning(step=2, event="resumed")))
    assert run.last("begun")["step"] == 1
    assert run.last("begun", "resumed")["step"] == 2
    assert run.last("ended")["how"] == "failed"


def test_rollouts_are_by_step_in_their_order_and_other_files_are_none(written: Writing) -> None:
    directory = Path("runs/a/rollouts")
    directory.mkdir(parents=True)
    others = ("step_x", "step_²", "step_000010-copy", "step_000010.bak", "step_7", "step_0000010", "other")
    for name in ("step_1000000", "step_000010", "step_999999", *others):
        (directory / f"{name}.jsonl").touch()
    (directory / "step_000003.txt").touch()
    found = written().rollout_files
    assert list(found) == [10, 999_999, 1_000_000]
    assert found[10] == directory / "step_000010.jsonl"


def refused(path: str | Path) -> UserError:
    with pytest.raises(UserError) as found:
        read_run(Path(path))
    assert found.value.fix
    return found.value


def test_a_missing_directory_is_named_with_the_runs_beside_it(written: Writing) -> None:
    written()
    error = refused("runs/b")
    assert (error.what, error.where, error.fix) == ("no such directory", "runs/b", "there are: runs/a")
    assert refused("nowhere/b").fix == refused("x" * 300).fix == refused(Path("x" * 300, "y")).fix
    assert "name the directory" in str(refused("nowhere/b"))


def test_a_checkpoint_is_told_from_its_run(written: Writing) -> None:
    written()
    checkpoint = Path("runs/a/checkpoints/step_000001")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    (checkpoint / "recipe.yaml").write_text(RECIPE)
    for path in (checkpoint, "runs/a/recipe.yaml"):
        error = refused(path)
        assert (error.what, error.fix) == (
            "this is a file or a checkpoint, not a run's directory",
            "name the run: runs/a",
        )


def test_a_directory_above_runs_is_none_and_says_which_are_in_it(written: Writing) -> None:
    written()
    error = refused("runs")
    assert error.what == "this is not a run's directory: it has no recipe.yaml"
    assert error.fix == "there are: runs/a"
    assert "name the directory that a run has made" in str(refused("."))


@pytest.mark.parametrize("recipe", ["a: 1", "- name\n- steps\n- model", "", "name: x\nsteps: 1"])
def test_yaml_of_something_else_is_no_recipe(recipe: str, written: Writing) -> None:
    with pytest.raises(UserError, match="this is no recipe of a run: it has no name, steps and model") as found:
        written(recipe)
    assert found.value.where == "runs/a/recipe.yaml" and found.value.fix


def test_yaml_that_is_broken_is_refused_with_its_line(written: Writing) -> None:
    with pytest.raises(UserError, match=r"not valid YAML: line 2, .+") as found:
        written("a: [1\nb: 2")
    assert found.value.where == "runs/a/recipe.yaml" and len(str(found.value).splitlines()) == 1
