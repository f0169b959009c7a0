"""What a run says of itself: begun, resumed, ended, and how; whatever it has ended of is heard of all the same."""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo import cli
from gspo.errors import RunError, Stopped, UserError
from gspo.interrupt import check_stop
from gspo.learner.trainer import Trainer
from gspo.recipe.load import load_recipe
from gspo.report.run_files import read_run
from gspo.run.checkpoint.checkpointer import Checkpointer
from gspo.run.console import Display
from gspo.run.directory import RunDirectory
from gspo.run.prepare import NOTHING
from gspo.run.recorder import Recorder
from gspo.run.run import open_run
from gspo.train import Outcome, train

TINY = Path(__file__).parents[1] / "tiny.yaml"
RUN = Path("runs/tiny")
SHORT = ["evaluation.num_queries=0", "cold_start.steps=1"]


def run(*overrides: str, resume: bool = False) -> Outcome:
    return train(load_recipe(TINY, [*SHORT, *overrides]), display=Display(quiet=True), resume=resume)


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUN / "history.jsonl").read_text(encoding="utf-8").splitlines()]


def at_each_step(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Do this once a step has been recorded."""
    step = Recorder.step

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        progress = step(*arguments, **keywords)
        do()
        return progress

    monkeypatch.setattr(Recorder, "step", recorded)


def raising(error: BaseException) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


def test_a_finished_run_has_begun_and_ended() -> None:
    outcome = run()
    begun, ended = lines()
    assert (begun["event"], begun["cold_start_step"], begun["step"]) == ("begun", 0, 0)
    assert (begun["process"], begun["host"]) == (os.getpid(), socket.gethostname())
    assert begun["working_directory"] == str(Path.cwd())
    assert begun["introduction"].startswith("tiny: Qwen3ForCausalLM") and "torch" in begun["environment"]
    assert (ended["event"], ended["how"], ended["reason"]) == ("ended", "finished", None)
    assert (ended["cold_start_step"], ended["step"]) == (1, 2)
    assert ended["seconds"] == pytest.approx(outcome.seconds, abs=5)
    elapsed = [line["time/elapsed_seconds"] for line in read_run(RUN).lines]
    assert len(elapsed) == 2 and 0 <= begun["seconds"] < elapsed[0] < elapsed[1] <= ended["seconds"]
    assert begun["time"] <= ended["time"] and begun["time"].endswith("+00:00")
    assert read_run(RUN).state == "finished"


def test_while_it_trains_it_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    at_each_step(monkeypatch, lambda: states.append((read_run(RUN).state, read_run(RUN).num_steps)))
    run()
    assert states == [("running", 1), ("running", 2)]


def test_an_error_in_the_reward_is_the_reason_and_is_raised_as_it_is() -> None:
    def reward(completions: list[str], **columns: Any) -> list[float]:
        if Path("runs/tiny/rollouts/step_000001.jsonl").exists():
            raise ValueError("no verifier today")
        return [float(number % 2) for number in range(len(completions))]

    recipe = load_recipe(TINY, SHORT)
    with pytest.raises(UserError, match="no verifier today") as raised:
        train(recipe, reward=reward, display=Display(quiet=True))
    begun, ended = lines()
    assert begun["event"] == "begun"
    assert (ended["how"], ended["reason"], ended["step"]) == ("failed", str(raised.value), 1)
    assert read_run(RUN).state == "failed"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ZeroDivisionError(), "ZeroDivisionError"), (OSError("a\udc80b"), "a\\udc80b"), (SystemExit(3), "3")],
)
def test_any_error_has_a_reason_and_is_raised_as_it_is(
    error: BaseException, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_each_step(monkeypatch, raising(error))
    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error
    assert (lines()[-1]["how"], lines()[-1]["reason"]) == ("failed", reason)


def test_a_run_that_goes_on_says_so_and_where() -> None:
    run("steps=1")
    run("steps=2", resume=True)
    events = [(line["event"], line.get("how"), line["cold_start_step"], line["step"]) for line in lines()]
    assert events == [
        ("begun", None, 0, 0),
        ("ended", "finished", 1, 1),
        ("resumed", None, 1, 1),
        ("ended", "finished", 1, 2),
    ]
    seconds = [line["seconds"] for line in lines()]
    assert 0 <= seconds[0] < seconds[1] and 0 < seconds[2] < seconds[3]
    assert seconds[3] > seconds[1]  # those before the resume count
    elapsed = [line["time/elapsed_seconds"] for line in read_run(RUN).lines]
    assert elapsed[0] <= seconds[2] < elapsed[1] <= seconds[3]
    assert read_run(RUN).last("resumed")["process"] == os.getpid()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_by_its_name(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    from gspo.run import collect

    score = collect.score_each

    def stopped(*arguments: Any, **keywords: Any) -> Any:
        signal.raise_signal(number)
        return score(*arguments, **keywords)

    monkeypatch.setattr(collect, "score_each", stopped)
    assert cli.main(["train", str(TINY), *SHORT]) == 128 + number
    ended = lines()[-1]
    assert (ended["how"], ended["reason"], ended["step"]) == ("stopped", number.name, 0)
    assert read_run(RUN).state == "stopped"


def test_a_stop_that_nobody_has_caught_is_one_all_the_same() -> None:
    given: dict[str, Any] = {"display": Display(quiet=True), "resume": False}
    opened = open_run(load_recipe(TINY, SHORT), Trainer(), NOTHING, **given)
    with pytest.raises(Stopped), opened as run, run.end_recorded():
        signal.raise_signal(signal.SIGTERM)
        check_stop()
    assert (lines()[-1]["how"], lines()[-1]["reason"]) == ("stopped", "SIGTERM")


def test_a_signal_after_the_last_step_has_stopped_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    save_model = RunDirectory.save_model

    def signalled(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        save_model(*arguments)

    monkeypatch.setattr(RunDirectory, "save_model", signalled)
    assert run().signal is None
    assert (lines()[-1]["how"], lines()[-1]["reason"]) == ("finished", None)


def test_a_second_ctrl_c_interrupts_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    at_each_step(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["train", str(TINY), *SHORT]) == 130
    assert (lines()[-1]["how"], lines()[-1]["reason"]) == ("interrupted", None)


def test_a_stop_whose_checkpoint_cannot_be_written_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Checkpointer) -> None:
        raise RunError("no room")

    def stop(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        check_stop()

    monkeypatch.setattr("gspo.run.collect.score_each", stop)
    monkeypatch.setattr(Checkpointer, "save", refuse)
    with pytest.raises(RunError, match="no room"):
        run()
    assert (lines()[-1]["how"], lines()[-1]["reason"]) == ("failed", "no room")


def no_history() -> None:
    """From now on it cannot be written."""
    (RUN / "history.jsonl").unlink()
    (RUN / "history.jsonl").mkdir()


@pytest.mark.parametrize("error", [None, ZeroDivisionError("the cause"), KeyboardInterrupt()])
def test_an_end_that_cannot_be_written_hides_no_error_and_is_none(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_it() -> None:
        no_history()
        if error is not None:
            raise error

    at_each_step(monkeypatch, break_it)
    if error is None:
        assert run("steps=1").model.is_dir()
        return
    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error and raised.value.__context__ is None


def test_a_beginning_that_cannot_be_written_ends_the_run_before_it_trains() -> None:
    run("steps=1")
    no_history()
    with pytest.raises(RunError, match=r"history\.jsonl could not be written"):
        run("steps=2", resume=True)
    (RUN / "history.jsonl").rmdir()
    assert read_run(RUN).num_steps == 1


@pytest.mark.parametrize("rest", ["", '{"time": "2026', '{"event": "ended"}\n'])
def test_a_line_that_a_killed_process_has_begun_does_not_spoil_the_next(rest: str) -> None:
    run("steps=1")
    with (RUN / "history.jsonl").open("a") as file:
        file.write(rest)
    before = (RUN / "history.jsonl").read_text()
    run("steps=2", resume=True)
    after = (RUN / "history.jsonl").read_text()
    assert after.startswith(before)
    found = read_run(RUN)
    assert [line["event"] for line in found.history][-2:] == ["resumed", "ended"]
    assert found.state == "finished"
    assert len(found.notes) == (rest == '{"time": "2026')


def test_what_is_appended_is_a_line_of_its_own_however_the_file_ends() -> None:
    Path("run").mkdir()
    directory = RunDirectory(Path("run"))
    for content, wanted in [(b"", b""), (b"a", b"a\n"), (b"a\n", b"a\n"), (b"\n", b"\n"), (b"a\nb", b"a\nb\n")]:
        (directory.path / "log").write_bytes(content)
        directory.append("log", {})
        assert (directory.path / "log").read_bytes() == wanted + b"{}\n"
    directory.close()
