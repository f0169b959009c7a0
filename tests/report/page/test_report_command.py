"""`gspo report` as a shell sees it, and the page that a training leaves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.report.page.lines import data_in, sets_in
from tests.report.page.made_runs import begun, ended, made_run, write_run

from gspo import cli
from gspo.errors import UserError
from gspo.report.page import write

TINY = Path(__file__).parents[2] / "tiny.yaml"
GSPO = Path(sys.executable).with_name("gspo")
SMALL = ("steps=1", "evaluation.num_queries=0", "cold_start.steps=0", "rollout.queries_per_step=4")
Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.os, "nice", lambda _: None)  # this process goes on with other tests


def test_the_command_writes_the_page_and_says_where(capsys: Said) -> None:
    made_run(Path("a"), name="a")
    made_run(Path("b"), name="b")
    assert cli.main(["report", "a"]) == 0
    assert capsys.readouterr() == ("report: a/report.html\n", "")
    assert cli.main(["report", "b", "a"]) == 0
    assert capsys.readouterr() == ("report: compared.html\n", "")
    assert cli.main(["report", "b", "a", "--out", "both.html"]) == 0
    assert capsys.readouterr() == ("report: both.html\n", "")
    assert len(data_in(Path("both.html").read_text(encoding="utf-8"))["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "where", "what", "fix"),
    [
        (["absent"], "absent", "no such directory", "there are: a"),
        (["a", "absent"], "absent", "no such directory", "there are: a"),
        (["partial"], "partial", "it has no recipe.yaml", "name the directory that a run has made"),
        (["foreign"], "foreign/recipe.yaml", "this is no recipe of a run", "name the directory that a run has made"),
        (["a/recipe.yaml"], "a/recipe.yaml", "this is a file or a checkpoint", "name the run: a"),
        (["a", "--out", "a/recipe.yaml"], "a/recipe.yaml", "is there already, and is no page", "--out page.html"),
        (["a", "--out", "absent/x.html"], "absent/x.html", "cannot be written: No such file", "--out page.html"),
    ],
)
def test_what_is_wrong_ends_with_2_and_says_what_where_and_how_to_mend_it(
    arguments: list[str], where: str, what: str, fix: str, capsys: Said
) -> None:
    made_run(Path("a"))
    for path in ("partial", "foreign"):
        Path(path).mkdir()
    Path("foreign/recipe.yaml").write_text("soup: of the day\n")
    Path("partial/metrics.jsonl").write_text('{"step": 1}\n')
    before = sorted(Path().rglob("*"))
    assert cli.main(["report", *arguments]) == 2
    said, error = capsys.readouterr()
    first, second = error.splitlines()
    assert said == "" and first.startswith(f"error: {where}: ") and what in first
    assert second.startswith("  fix: ") and fix in second
    assert sorted(Path().rglob("*")) == before


def test_nothing_that_a_directory_holds_or_is_called_reaches_the_terminal_as_a_command(capsys: Said) -> None:
    hostile = "\x1b[2J\x9b\u202e\ud800"
    settings = {"name": f"a{hostile}", "steps": 1, "model": {}}
    run = write_run(Path(os.fsdecode(b"a\x1b[2J\xff")), settings=settings, history=[begun(), ended("failed", hostile)])
    for arguments in ([str(run)], ["absent"], [str(run), "--out", f"{hostile[:-1]}/x"]):
        cli.main(["report", *arguments])
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert text.isprintable() or not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)
        assert "␛[2J" in text


def test_a_report_needs_neither_torch_nor_its_like() -> None:
    made_run(Path("a"))
    heavy = ("torch", "transformers", "datasets", "reasoning_gym", "pandas", "matplotlib")
    code = f"""
import sys
from gspo.cli import main
assert main(["report", "a"]) == 0
print([name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["report: a/report.html", "[]"]


def test_a_training_leaves_its_page_and_says_where(capsys: Said) -> None:
    assert cli.main(["train", str(TINY), *SMALL]) == 0
    assert "\nreport           runs/tiny/report.html\n" in capsys.readouterr().out
    page = Path("runs/tiny/report.html").read_text(encoding="utf-8")
    (run,) = data_in(page)["runs"]
    assert run["state"] == "finished: 1 of 1 steps"
    assert cli.main(["report", "runs/tiny", "--out", "again.html"]) == 0
    again = Path("again.html").read_text(encoding="utf-8")
    assert data_in(again)["runs"] == [run] and sets_in(again) == sets_in(page)


@pytest.mark.parametrize("error", [UserError("no room", where="x"), MemoryError("big"), KeyError("a")])
def test_whatever_a_page_fails_of_is_a_note(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(write, "write_report", fail)
    notes: list[str] = []
    cli._write_report(Path("runs/a"), notes.append)
    assert notes == [f"no report is written: {error}; again with: gspo report runs/a"]
