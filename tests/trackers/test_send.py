"""Trackers that hang, raise or are offline beside a block that writes steps, and what is sent of it later."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
from tests.trackers.fake import PATIENCE, FakeTracker
from tests.trackers.made import COLUMNS, NUMBERS, MadeRun

from gspo.errors import RunError, UserError
from gspo.interrupt import Interrupt
from gspo.run.lock import Lock
from gspo.track import track
from gspo.trackers import send as send_module
from gspo.trackers import tracker
from gspo.trackers.send import tracked


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_module, "WAIT_SECONDS", PATIENCE)
    monkeypatch.setattr(send_module, "STOPPED_SECONDS", PATIENCE)
    monkeypatch.setattr("gspo.run.lock._ATTEMPTS", 1)


@pytest.fixture
def run(made_run: Callable[..., MadeRun]) -> MadeRun:
    return made_run(report={"trackers": ["wandb"]})


@contextmanager
def training(run: MadeRun, notes: list[str], *, signal: Any = None) -> Iterator[Callable[[int], None]]:
    """A block in which a function writes a step and announces it, as training does."""
    interrupt = Interrupt(notes.append)
    interrupt.signal = signal
    with tracked(run.path, ["wandb"], notes.append, interrupt) as announce:

        def step(number: int) -> None:
            run.step(number)
            announce(number)

        yield step


def sent_later(run: MadeRun, to: list[str] | None = None) -> str:
    notes: list[str] = []
    track(run.path, to, note=notes.append)
    return "\n".join(notes)


def test_a_slow_tracker_holds_no_step_up_and_gets_all_of_them(run: MadeRun, fake: FakeTracker) -> None:
    fake.hangs = "log"
    notes: list[str] = []
    with training(run, notes) as step:
        step(1)
        assert fake.is_hanging.wait(PATIENCE)
        for number in range(2, 20):
            step(number)
        assert fake.steps == []
        fake.let_go.set()
    assert fake.opened == [None] and fake.steps == list(range(1, 20)) and fake.num_finished == 1
    assert fake.logged[0][0] == NUMBERS
    assert [list(row) for row in fake.logged[0][1]] == [COLUMNS] * 8
    assert run.state() == {"run": "number 1", "step": 19, "closed": True}
    assert not any("tracker wandb" in note for note in notes)


def test_a_package_that_ends_the_program_when_imported_ends_no_training(
    run: MadeRun, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(name: str) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(send_module, "import_module", leave)
    with training(run, []) as step:
        step(1)
    assert fake.steps == [1]


def test_a_step_is_sent_once_it_is_announced(run: MadeRun, fake: FakeTracker) -> None:
    fake.hangs = "finish"
    with training(run, []) as step:
        run.step(0)
        step(1)
        run.line("metrics.jsonl", {"step": 2})  # whose rollouts are still being written
        while fake.steps != [0, 1]:
            pass
        fake.hangs = ""
        step(2)
    assert fake.steps == [0, 1, 2] and len(fake.logged[2][1]) == 8


@pytest.mark.parametrize("verb", ["open", "log", "finish"])
def test_a_tracker_that_hangs_is_left_behind(
    verb: str, run: MadeRun, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_module, "WAIT_SECONDS", 0.02)
    fake.hangs = verb
    notes: list[str] = []
    with training(run, notes) as step:
        step(1)
    assert notes == [
        "sending what is left to wandb (0.02 s at most) …",
        f"tracker wandb is not done; to send what it lacks: gspo track {run.path} --to wandb",
    ]
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "wandb"]
    assert thread.daemon, "it would keep the process from its end"
    assert fake.is_hanging.wait(PATIENCE)
    with pytest.raises(UserError, match="is writing to this directory"):
        sent_later(run)
    fake.let_go.set()
    thread.join(PATIENCE)


@pytest.mark.parametrize("verb", ["open", "log", "finish"])
@pytest.mark.parametrize("error", [ConnectionError("offline"), SystemExit(3)])
def test_a_tracker_that_raises_is_off_and_gets_the_rest_later(
    verb: str, error: BaseException, run: MadeRun, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeTracker()
    monkeypatch.setitem(tracker.OPENERS, "trackio", other.open)
    fake.fails[verb] = error
    notes: list[str] = []
    with tracked(run.path, ["wandb", "trackio", "wandb"], notes.append, Interrupt(notes.append)) as announce:
        for number in (1, 2):
            run.step(number)
            announce(number)
    (note,) = [note for note in notes if "left" not in note]
    why = f"{type(error).__name__}: {error}"
    assert note == (
        f"tracker wandb has failed ({why}) and is off; to send what it lacks: gspo track {run.path} --to wandb"
    )
    assert fake.opened == [None] and fake.num_finished == 0
    assert other.steps == [1, 2] and other.num_finished == 1
    fake.fails = {}
    assert "it has the run up to step 2" in sent_later(run)
    assert fake.opened == [None, None if verb == "open" else "number 1"]
    assert fake.steps == [1, 2] and run.state()["closed"]


def test_a_package_that_cannot_be_imported_is_a_note(run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    notes: list[str] = []
    with training(run, notes) as step:
        step(1)
    assert any("tracker wandb has failed (ModuleNotFoundError: " in note for note in notes)


def test_after_a_signal_it_is_not_waited_long(run: MadeRun, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert send_module.STOPPED_SECONDS == PATIENCE
    monkeypatch.setattr(send_module, "STOPPED_SECONDS", 0.01)
    fake.hangs = "log"
    timer = threading.Timer(5, fake.let_go.set)  # what waits longer sees it come to its end
    timer.start()
    notes: list[str] = []
    with training(run, notes, signal=SIGTERM) as step:
        step(1)
    timer.cancel()
    assert "tracker wandb is not done" in notes[-1]


def test_whoever_ends_training_at_once_waits_for_no_tracker(run: MadeRun, fake: FakeTracker) -> None:
    fake.hangs = "log"
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt), training(run, notes) as step:
        step(1)
        raise KeyboardInterrupt
    assert len(notes) == 1 and "tracker wandb is not done" in notes[0]


def test_a_resumed_run_goes_on_in_the_same_run_without_double_steps(run: MadeRun, fake: FakeTracker) -> None:
    with training(run, []) as step:
        for number in range(5):
            step(number)
    log = run.path / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))  # back to step 2, as a resume does it
    with training(run, []) as step:
        for number in range(3, 7):
            step(number)
    assert fake.opened == [None, "number 1"] and fake.steps == list(range(7))


def test_a_tracker_that_can_tell_what_it_has_is_asked_after_a_kill(run: MadeRun, fake: FakeTracker) -> None:
    for number in range(1, 6):
        run.step(number)
    run.state(run="number 1", step=5, closed=False)
    fake.last_step = 3
    sent_later(run)
    assert fake.opened == ["number 1"] and fake.steps == [4, 5]
    fake.last_step = 1  # of which nothing is asked where it has finished
    assert sent_later(run) == "tracker wandb: nothing new to send; it has the run up to step 5"
    assert fake.opened == ["number 1"]


def test_the_command_goes_on_to_the_next_tracker(
    run: MadeRun, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeTracker()
    monkeypatch.setitem(tracker.OPENERS, "trackio", other.open)
    fake.fails["log"] = OSError("no route")
    run.step(1)
    with pytest.raises(RunError, match="tracker wandb: OSError: no route"):
        track(run.path, ["wandb", "trackio", "wandb"], note=print)
    assert other.steps == [1]


def test_the_command_refuses_what_it_cannot_do(
    run: MadeRun, made_run: Callable[..., MadeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, to: list[str] | None = None) -> str:
        with pytest.raises(UserError) as caught:
            track(path, to, note=print)
        return str(caught.value)

    assert "no tracker 'wndb'" in refused(run.path, ["wndb"])
    assert "no such directory" in refused(run.path / "absent")
    for section in (3, None, "x", {"trackers": 3}):
        assert "the run's recipe has no report.trackers" in refused(made_run(repr(section), report=section).path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # as if it were not installed
        assert "fix: pip install wandb" in refused(run.path)
        (tmp_path / "mere" / "wandb").mkdir(parents=True)  # a directory is no package
        patch.delitem(sys.modules, "wandb")
        patch.setattr(sys, "path", [str(tmp_path / "mere")])
        assert "fix: pip install wandb" in refused(run.path)
    assert not (run.path / "trackers").exists()


def test_a_state_that_cannot_be_read_is_refused_and_nothing_is_written_through_a_link(
    run: MadeRun, fake: FakeTracker, tmp_path: Path
) -> None:
    for text in ("{}{", '{"step": "x"}', '{"run": [1]}', "[" * 5000, '{"run": null, "step": 1}'):
        (run.path / "trackers").mkdir(exist_ok=True)
        (run.path / "trackers" / "wandb.json").write_text(text)
        with pytest.raises(UserError, match="remove it, and the run is sent as a new one"):
            sent_later(run)
    (run.path / "trackers" / "wandb.json").unlink()
    (tmp_path / "precious").write_text("{}")
    (run.path / "trackers" / "wandb").mkdir()
    (run.path / "trackers" / "wandb" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        sent_later(run)
    (run.path / "trackers" / "wandb" / "lock").unlink()
    lock = Lock(run.path / "trackers" / "wandb")
    with pytest.raises(UserError, match="is writing to this directory"):
        sent_later(run)
    lock.release()
    assert fake.opened == [] and (tmp_path / "precious").read_text() == "{}"


_HANGS = """
import atexit, sys, threading, time
from pathlib import Path
from gspo import cli
from gspo.interrupt import Interrupt
from gspo.trackers import send, tracker

def hang(*_):
    threading.Thread(target=time.sleep, args=(600,)).start()  # which is a daemon, as the thread is that starts it
    if as_program:
        atexit.register(time.sleep, 600)  # as wandb does
    is_hanging.set()
    time.sleep(600)

def command(options):
    with send.tracked(Path(sys.argv[2]), ["wandb"], print, Interrupt(print)) as announce:
        is_hanging.wait()
    print("ends")
    return 7

as_program, is_hanging = sys.argv[1] == "program", threading.Event()
send.WAIT_SECONDS, tracker.OPENERS["wandb"], cli._COMMANDS["show"] = 0.01, hang, command
if as_program:
    sys.argv[1:2] = ["show"]
    sys.exit(cli.main())
sys.exit(command(None))
"""


@pytest.mark.parametrize("kind", ["program", "module"])
def test_a_process_ends_though_its_tracker_hangs(kind: str, run: MadeRun) -> None:
    command = [sys.executable, "-c", _HANGS, kind, str(run.path)]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 7, done.stderr.decode()
    assert b"is not done" in done.stdout and done.stdout.endswith(b"ends\n"), "what is printed last is there"
