"""A run that is watched: its page is written again when there is more, whole at any instant, until it has ended."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.report.page.lines import data_in
from tests.report.page.made_runs import begun, ended, made_run, metrics_line, rollouts, write_run

from gspo import cli
from gspo.errors import UserError
from gspo.report import run_files
from gspo.report.page import write


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Watched:
    """A run under way, and what is done to it while the watch sleeps."""

    def __init__(self, *changes: Callable[[], object]) -> None:
        self.path = write_run(Path("a"), lines=[metrics_line(step) for step in (0, 1)], history=[begun()])
        self.changes = list(changes)
        self.pages: list[str] = []
        self.notes: list[str] = []
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        assert seconds >= 2
        self.slept.append(seconds)
        self.look()
        self.changes.pop(0)()

    def look(self) -> None:
        text = Path("a/report.html").read_text(encoding="utf-8")
        assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
        self.pages.append(text)

    def watch(self) -> list[bool]:
        """Whether the run was under way on each page that was seen."""
        write.watch([self.path], note=self.notes.append, sleep=self.sleep)
        self.look()
        assert not self.changes
        return [data_in(text)["runs"][0]["state"] == "running" for text in self.pages]


def add(name: str, line: dict[str, Any]) -> Callable[[], object]:
    def append() -> None:
        with Path("a", name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return append


def sample_step() -> None:
    Path("a/rollouts").mkdir()
    Path("a/rollouts/step_000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rollouts(1)))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of each page that is written."""
    numbers: list[int] = []
    document = write.document

    def numbered(*arguments: Any, **options: Any) -> str:
        numbers.append(len(numbers) + 1)
        return document(*arguments, **options).rstrip().removesuffix("</html>") + f"<!-- {numbers[-1]} --></html>"

    monkeypatch.setattr(write, "document", numbered)
    return numbers


def shown_numbers(watched: Watched) -> list[int]:
    return [int(re.findall(r"<!-- (\d+) -->", text)[-1]) for text in watched.pages]


@pytest.mark.parametrize(
    "more",
    [
        add("metrics.jsonl", metrics_line(2)),
        add("cold_start.jsonl", {"step": 1, "loss": 1.0}),
        add("history.jsonl", begun(event="resumed")),
        sample_step,
    ],
)
def test_the_page_is_written_again_when_there_is_more(more: Callable[[], object], written: list[int]) -> None:
    watched = Watched(lambda: None, more, lambda: None, add("history.jsonl", ended()))
    assert watched.watch() == [True, True, True, True, False]
    assert shown_numbers(watched) == [1, 1, 2, 2, 3] and written == [1, 2, 3]


def test_a_line_that_is_not_whole_is_not_more(written: list[int]) -> None:
    def half() -> None:
        with Path("a/metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "reward')

    watched = Watched(half, add("history.jsonl", ended()))
    assert watched.watch() == [True, True, False] and written == [1, 2]


def test_what_was_written_is_on_the_page() -> None:
    watched = Watched(add("metrics.jsonl", metrics_line(2)), add("history.jsonl", ended("failed", "no room")))
    watched.watch()
    shown = [data_in(text)["runs"][0]["overview"]["state"] for text in watched.pages]
    running = "still running: {} of 6 steps so far"
    again = "it can be resumed: gspo resume a"
    assert shown == [running.format(1), running.format(2), f"failed after 2 of 6 steps ({again}): no room"]
    assert watched.notes[1:] == [f"made: {shown[-1]}", "report: a/report.html"]


def test_it_is_said_where_the_page_is_and_how_to_end_and_in_the_end_what_came_of_the_run() -> None:
    watched = Watched(add("metrics.jsonl", metrics_line(2)), add("history.jsonl", ended()))
    watched.watch()
    assert watched.notes == [
        "report: a/report.html (written again as the run goes on; Ctrl-C ends this)",
        "made: finished: 2 of 6 steps",
        "report: a/report.html",
    ]


@pytest.mark.parametrize(("seconds", "rest"), [(0.0, 2.0), (0.19, 2.0), (0.3, 3.0), (7.0, 70.0)])
def test_it_rests_ten_times_as_long_as_it_worked(seconds: float, rest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, document = [1000.0], write.document

    def slow(*arguments: Any, **options: Any) -> str:
        clock[0] += seconds
        return document(*arguments, **options)

    monkeypatch.setattr(write, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(write, "document", slow)
    more = add("metrics.jsonl", metrics_line(2))
    watched = Watched(lambda: None, more, lambda: None, add("history.jsonl", ended()))
    watched.watch()
    assert watched.slept == pytest.approx([rest, 2.0, rest, 2.0])  # 2 where there was nothing to write


def test_a_run_that_is_killed_ends_the_watch_though_it_has_written_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = [True]
    monkeypatch.setattr(run_files, "is_locked", lambda _: alive[-1])
    watched = Watched(lambda: None, lambda: alive.append(False))
    assert watched.watch() == [True, True, False]
    assert "killed, or crashed, after 1 of 6 steps" in watched.pages[-1]
    again = "it can be resumed: gspo resume a"
    assert watched.notes[1:] == [f"made: killed, or crashed, after 1 of 6 steps; {again}", "report: a/report.html"]


def test_a_run_that_has_ended_is_written_once(written: list[int]) -> None:
    made_run(Path("a"))
    notes: list[str] = []
    write.watch([Path("a")], Path("b.html"), note=notes.append, sleep=lambda _: pytest.fail("it has ended"))
    assert written == [1]
    assert notes == ["made: finished: 6 of 6 steps", "report: b.html (written once: no run is under way)"]
    assert data_in(Path("b.html").read_text(encoding="utf-8"))["runs"][0]["state"] == "finished"


def test_of_several_runs_the_last_under_way_ends_the_watch() -> None:
    watched = Watched(lambda: None, add("history.jsonl", ended()))
    made_run(Path("b"), name="b")

    def sleep(_: float) -> None:
        watched.changes.pop(0)()

    write.watch([Path("b"), watched.path], note=watched.notes.append, sleep=sleep)
    assert not watched.changes and Path("compared.html").is_file() and not Path("b/report.html").exists()
    ends = ["b: finished: 6 of 6 steps", "made: finished: 1 of 6 steps"]
    assert watched.notes[1:] == [*ends, "report: compared.html"]


def test_a_run_that_goes_away_is_said() -> None:
    watched = Watched(lambda: Path("a/recipe.yaml").unlink())
    with pytest.raises(UserError, match=r"no recipe\.yaml"):
        watched.watch()


def test_an_interrupt_ends_the_command_as_a_shell_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    write_run(Path("a"), history=[begun()])
    monkeypatch.setattr(write.watch, "__kwdefaults__", {"sleep": interrupt})
    nicer: list[int] = []
    monkeypatch.setattr(cli.os, "nice", nicer.append)
    assert cli.main(["report", "a", "--watch"]) == 128 + signal.SIGINT
    assert Path("a/report.html").is_file() and nicer == [10]


def test_two_that_write_at_once_do_not_spoil_each_others_page(monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(Path("a"))
    unfinished, replace = [], Path.replace

    def look(path: Path, target: Path) -> Path:
        unfinished.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", look)
    for process in (1, 2):
        monkeypatch.setattr(write.os, "getpid", lambda process=process: process)
        write.write_report([Path("a")], note=lambda _: None)
    assert len(set(unfinished)) == 2
