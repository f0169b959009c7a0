"""The processes that follow a run: what they are, when they end, and what is said of those that fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.trackers.fake import FakeWandb, process, sent
from tests.trackers.made import NUMBERS, MadeRun

from gspo.errors import RunError, UserError
from gspo.report.run_files import read_run
from gspo.trackers import follow as follow_module
from gspo.trackers import followers, tracker
from gspo.trackers.followers import following
from gspo.trackers.sender import sending
from gspo.trackers.sent import Sent, read_sent, write_sent
from gspo.trackers.track import is_under_way, track

SECONDS = 60  # after which a test gives up


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """Stands in for wandb."""
    monkeypatch.setattr(followers, "WAIT_SECONDS", SECONDS)
    return FakeWandb(tmp_path / "fake", monkeypatch)


@pytest.fixture
def run(made_run: Callable[..., MadeRun]) -> MadeRun:
    """A run that this process has begun, with one step."""
    made = made_run(report={"trackers": ["wandb"]})
    made.event("begun", process=os.getpid())
    made.step(1)
    return made


def follow(run: MadeRun, do: Callable[[], object] = lambda: None) -> str:
    """Follow a run until it has ended; what was said."""
    notes: list[str] = []
    with following(run.path, ["wandb"], notes.append):
        do()
        run.event("ended", how="finished")
    return "\n".join(notes)


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(path: Path) -> None:
    wait_until(path.exists)


def test_it_follows_the_run_to_its_end(run: MadeRun, fake: FakeWandb) -> None:
    def go_on() -> None:
        wait_for(run.path / "trackers" / "fake.jsonl")
        run.step(2)
        run.step(3)

    assert "failed" not in follow(run, go_on)
    (number,) = {line[0] for line in sent(run.path)}
    assert sent(run.path) == [[number, step, NUMBERS] for step in (1, 2, 3)]
    state = json.loads((run.path / "trackers" / "wandb.json").read_text())
    assert state == {"run": number, "step": 3, "closed": True}


def test_a_tracker_that_fails_is_said_at_once_and_again_in_the_end(run: MadeRun, fake: FakeWandb) -> None:
    fake.misbehave("raises")
    notes: list[str] = []
    with following(run.path, ["wandb"], notes.append):
        wait_until(lambda: notes)
        run.step(2)
        run.event("ended", how="finished")
        told = list(notes)
    assert told == ["tracker wandb has failed (ConnectionError: no such host); training goes on without it"]
    (again,) = notes[1:]
    assert again.startswith(
        "tracker wandb has failed (ConnectionError: no such host): has 0 of 2 steps; the rest: gspo"
    )


def test_a_tracker_that_dies_is_said_at_once(run: MadeRun, fake: FakeWandb) -> None:
    fake.misbehave("dies")
    notes: list[str] = []
    run.step(2)
    with following(run.path, ["wandb"], notes.append):
        wait_until(lambda: notes)
        run.event("ended", how="finished")
    assert notes[0] == "tracker wandb has failed (it has said nothing); training goes on without it"
    assert "has 1 of 2 steps, not all of them for certain" in notes[1] and len(notes) == 2


def test_what_fails_after_training_is_not_said_to_go_on_without_it(run: MadeRun, fake: FakeWandb) -> None:
    fake.misbehave("fails at the end")
    said = follow(run)
    assert "has failed (TimeoutError: no answer): has 1 of 1 steps, not all of them for certain" in said
    assert "training goes on" not in said


def test_a_tracker_that_has_taken_the_run_for_over_is_said_in_the_end(
    made_run: Callable[..., MadeRun], fake: FakeWandb
) -> None:
    run = made_run(report={"trackers": ["wandb"]})
    run.event("begun")
    run.step(1)
    notes: list[str] = []
    state = run.path / "trackers" / "wandb.json"
    with following(run.path, ["wandb"], notes.append):
        wait_until(lambda: state.exists() and json.loads(state.read_text())["closed"])
        run.step(2)
        run.event("ended", how="finished")
    assert "tracker wandb has ended before the run: has 1 of 2 steps; the rest: gspo track" in notes[-1]
    assert not any("failed" in note for note in notes)


def test_a_run_without_a_step_has_nothing_that_a_tracker_lacks(
    made_run: Callable[..., MadeRun], fake: FakeWandb
) -> None:
    run = made_run(report={"trackers": ["wandb"]})
    run.event("begun", process=os.getpid())
    assert "wandb has" not in follow(run)


@pytest.mark.parametrize(
    ("changes", "goes_on"),
    [
        ({"process": os.getpid()}, True),
        ({"process": os.getpid(), "time": "1970-01-01T00:00:00+00:00"}, True),  # the clock was set
        ({}, False),  # nobody has the lock
        ({"host": "elsewhere"}, True),  # as far as can be told
    ],
)
def test_whether_a_run_goes_on_is_told_by_its_lock(
    changes: dict[str, Any], goes_on: bool, made_run: Callable[..., MadeRun]
) -> None:
    run = made_run()
    run.event("begun", **changes)
    assert is_under_way(run.path) is goes_on
    run.event("ended", how="stopped")
    assert is_under_way(run.path) is False


def test_it_is_a_process_that_leaves_training_alone(run: MadeRun, fake: FakeWandb) -> None:
    standard_input, (theirs, ours) = os.dup(0), os.pipe()
    assert run.lock is not None
    os.dup2(theirs, 0)
    follow(run)
    os.dup2(standard_input, 0)
    for number in (standard_input, theirs, ours):
        os.close(number)
    about = process(run.path)
    assert about["session"] and about["niceness"] >= 10
    assert str(run.path / "lock") not in about["files"] and about["input"] == "/dev/null"
    assert not {"torch", "transformers", "pydantic"} & set(about["modules"])


def test_a_tracker_that_hangs_is_ended(run: MadeRun, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "WAIT_SECONDS", 0.1)
    fake.misbehave("hangs")
    said = follow(run, lambda: wait_for(run.path / "trackers" / "process.json"))
    assert "sending what is left to wandb (0.1 s at most)" in said
    assert "tracker wandb was not done in time: has 0 of 1 steps; the rest: gspo track" in said
    with sending(read_run(run.path), "wandb", wait=False):
        pass  # which another process would not let be


def test_whoever_ends_training_at_once_waits_for_no_tracker(run: MadeRun, fake: FakeWandb) -> None:
    fake.misbehave("hangs")
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt), following(run.path, ["wandb"], notes.append):
        wait_for(run.path / "trackers" / "process.json")
        raise KeyboardInterrupt
    assert len(notes) == 1 and "was not done in time" in notes[0]


def test_a_process_that_cannot_be_started_is_said(run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "tracker wandb: its process could not be started: " in follow(run)


def test_a_log_that_is_a_link_is_not_written_through(run: MadeRun, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (run.path / "trackers").mkdir()
    (run.path / "trackers" / "wandb.log").symlink_to(tmp_path / "precious")
    assert "wandb.log: this is a link" in follow(run) and (tmp_path / "precious").read_text() == "precious"


_KILLED = """
import os, sys, pathlib
from gspo.run.lock import Lock
from gspo.trackers.followers import following
lock = Lock(pathlib.Path(sys.argv[1]))
with following(pathlib.Path(sys.argv[1]), ["wandb"], print):
    sys.stdin.read()
"""


def test_it_ends_by_itself_when_training_is_killed(
    made_run: Callable[..., MadeRun], fake: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run()
    command = [sys.executable, "-c", _KILLED, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as training:
        run.event("begun")
        run.step(1)
        wait_for(run.path / "trackers" / "fake.jsonl")
        run.step(2, rollouts=3)  # killed as it wrote them
        training.send_signal(signal.SIGKILL)
        assert training.wait(SECONDS) == -signal.SIGKILL
    with sending(read_run(run.path), "wandb", wait=True) as sender:  # the lock is free once it has ended
        assert sender.step == 2
    assert json.loads((run.path / "trackers" / "wandb.json").read_text())["closed"]


def test_a_tracker_that_hangs_is_let_go_of_some_time_after_training_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    parents = iter([7, 7, 1])
    monkeypatch.setattr("gspo.trackers.follow.os.getppid", lambda: next(parents))
    monkeypatch.setattr("gspo.trackers.follow.time.sleep", slept.append)
    monkeypatch.setattr("gspo.trackers.follow.os._exit", slept.append)
    follow_module._end_after(7)
    assert slept == [1, 1, follow_module.ORPHAN_SECONDS, 1]


def _found(name: str) -> Any:
    """As if every tracker's package were installed, which this is not about."""
    return SimpleNamespace(origin=name)


def test_the_command_refuses_what_it_cannot_do(
    run: MadeRun, made_run: Callable[..., MadeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, to: list[str] | None) -> str:
        with pytest.raises(UserError) as caught:
            track(path, to, follow=False, note=print)
        return str(caught.value)

    assert "no tracker 'wndb'" in refused(run.path, ["wndb"])
    assert "no such directory" in refused(run.path / "absent", None)
    untracked = made_run("untracked")
    assert "the run's recipe has no report.trackers" in refused(untracked.path, None)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # as if it were not installed
        assert "fix: pip install wandb" in refused(run.path, None)
        assert not (run.path / "trackers").exists()
    monkeypatch.setattr(tracker, "find_spec", _found)
    with sending(read_run(run.path), "wandb", wait=False):
        assert "another process is sending this run to wandb" in refused(run.path, None)
    for text in ("{}{", '{"step": "x"}', '{"run": [1]}', "[" * 5000):
        (run.path / "trackers" / "wandb.json").write_text(text)
        assert "remove it, and the run is sent as a new one" in refused(run.path, None)
    for name in ("wandb.lock", "wandb.json"):
        (tmp_path / "precious").write_text("{}")
        (run.path / "trackers" / name).unlink()
        (run.path / "trackers" / name).symlink_to(tmp_path / "precious")
    assert "wandb.lock: this is a link" in refused(run.path, None)
    write_sent(run.path / "trackers" / "wandb.json", Sent(step=3))
    assert (tmp_path / "precious").read_text() == "{}" and read_sent(run.path / "trackers" / "wandb.json").step == 3


@pytest.mark.parametrize("section", [3, None, "x", {"trackers": 3}, {"trackers": [["a"]]}])
def test_a_recipe_of_another_kind_names_no_tracker(section: Any, made_run: Callable[..., MadeRun]) -> None:
    with pytest.raises(UserError, match=r"no report\.trackers|no tracker"):
        track(made_run(report=section).path, None, follow=False, note=print)


def test_a_mere_directory_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mere").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracker, "NAMES", ("mere",))
    with pytest.raises(UserError, match="not installed"):
        tracker.check_trackers(["mere"], where="here")


def test_the_command_follows_too_and_names_a_tracker_that_fails(run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Steady:
        run, last_step = "one", None

        def __init__(self, opening: tracker.Opening) -> None:
            self.name = opening.directory.name

        def log(self, step: int, metrics: Any, samples: Any) -> None:
            if self.name == "wandb":
                raise OSError("no route")
            seen.append(step)

        def close(self) -> None:
            seen.append("closed")

    def sleep(seconds: float) -> None:  # the run goes on in the meantime
        run.step(2)
        run.event("ended", how="finished")

    monkeypatch.setattr(tracker, "find_spec", _found)
    monkeypatch.setattr("gspo.trackers.sender.open_tracker", lambda name, opening: Steady(opening))
    monkeypatch.setattr("gspo.trackers.track.time.sleep", sleep)
    notes: list[str] = []
    with pytest.raises(RunError, match="tracker wandb: OSError: no route"):
        track(run.path, ["wandb", "tensorboard", "wandb"], follow=True, note=notes.append)
    assert seen == [1, 2, "closed"]
    assert notes == ["tracker tensorboard: 2 step(s) sent; it has the run up to step 2"]
