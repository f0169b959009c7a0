"""Writing the page: where, of which runs, how large, whole at any instant, and what is said where it cannot be."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import data_in, sets_in
from tests.report.page.made_runs import made_run, recipe, sample, write_run

from gspo.errors import UserError
from gspo.report.page.write import document, write_report
from gspo.report.run_files import read_run

pytestmark = pytest.mark.usefixtures("own_directory")

LOG = Path(__file__).with_name("default_run.jsonl")


def quiet(_: str) -> None:
    pass


def refused(*paths: Path, out: Path | None = None) -> UserError:
    with pytest.raises(UserError) as found:
        write_report(paths, out, note=quiet)
    assert found.value.where and found.value.fix
    return found.value


def test_by_default_the_page_is_in_its_run_and_that_of_several_where_one_stands_and_it_is_said_where() -> None:
    said: list[str] = []
    runs = [made_run(Path(name), name=name) for name in ("b", "a")]
    assert write_report(runs[:1], note=said.append) == Path("b/report.html")
    own = Path("b/report.html").read_bytes()
    for _ in range(2):  # the second replaces the first
        assert write_report(runs, note=said.append) == Path("compared.html")
    assert said == ["report: b/report.html", "report: compared.html", "report: compared.html"]
    assert Path("b/report.html").read_bytes() == own
    assert sorted(map(str, Path().rglob("*.html"))) == ["b/report.html", "compared.html"]
    data = data_in(Path("compared.html").read_text(encoding="utf-8"))
    assert [run["label"] for run in data["runs"]] == ["b", "a"]


@pytest.mark.parametrize("content", ["", "my notes", "<!DOCTYPE html><title>of something else – gspo</title>"])
def test_a_file_that_is_no_page_is_never_replaced(content: str) -> None:
    runs = [made_run(Path(name), name=name) for name in ("b", "a")]
    Path("compared.html").write_text(content)
    for error in (refused(*runs), refused(*runs[:1], out=Path("compared.html"))):
        assert error.where == "compared.html" and "no page that gspo has written" in error.what
    assert Path("compared.html").read_text() == content


def test_the_files_of_a_run_are_not_replaced_by_its_page() -> None:
    run = made_run(Path("a"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for path in before:
        assert "no page that gspo has written" in refused(run, out=path).what
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_directory_given_twice_is_one_run_however_it_is_spelled() -> None:
    made_run(Path("a"))
    Path("link").symlink_to("a")
    write_report([Path("a"), Path("a"), Path("a/../a"), Path("a").absolute(), Path("link")], note=quiet)
    data = data_in(Path("a/report.html").read_text(encoding="utf-8"))
    assert len(data["runs"]) == 1


def test_where_no_file_can_be_it_is_said_and_no_directory_is_made() -> None:
    run = made_run(Path("a"))
    for out, why in (("absent/page.html", "No such file"), ("a", "Is a directory"), ("x" * 250, "File name too long")):
        assert f"cannot be written: {why}" in refused(run, out=Path(out)).what
    assert not Path("absent").exists() and refused(Path("x" * 300)).what == "no such directory"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_what_cannot_be_written_is_said_and_nothing_is_left(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "w" in mode or number == errno.ENOSPC:
            raise OSError(number, os.strerror(number))
        return opened(path, mode, *arguments, **options)

    opened = io.open
    made_run(Path("a"))
    before = sorted(Path("a").iterdir())
    monkeypatch.setattr(*(os, "fsync") if number == errno.ENOSPC else (io, "open"), fail)
    error = refused(Path("a"))
    assert error.what == f"cannot be written: {os.strerror(number)}" and error.where == "a/report.html"
    assert sorted(Path("a").iterdir()) == before


def test_until_the_page_is_whole_the_old_one_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(Path("a"))
    old = '<meta name="generator" content="gspo report">'
    Path("a/report.html").write_text(old)
    seen, replace = [], Path.replace

    def look(path: Path, target: Path) -> Path:
        seen.append((path.parent, Path("a/report.html").read_text(), path.read_text(encoding="utf-8")[-8:].strip()))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", look)
    write_report([Path("a")], note=quiet)
    assert seen == [(Path("a"), old, "</html>")]


def test_the_page_of_60_steps_is_no_larger_than_250_kilobytes() -> None:
    lines = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]  # of the default run
    log = [lines[0], *({**lines[1 + step % (len(lines) - 1)], "step": step} for step in range(1, 61))]
    assert len(document([read_run(write_run(Path("a"), lines=log))]).encode()) <= 250_000


def test_what_has_no_encoding_does_not_spoil_the_page() -> None:
    path = write_run(Path(os.fsdecode(b"caf\xe9")), samples={1: []})
    line = json.dumps(sample("\ud83d", prompt="é\ud83d"))
    (path / "rollouts" / "step_000001.jsonl").write_text(line + "\n", encoding="utf-8")
    target = write_report([path], note=quiet)
    (run,) = data_in(target.read_text(encoding="utf-8"))["runs"]
    assert run["label"] == "made" and sets_in(target.read_text(encoding="utf-8"))


def test_what_a_run_contains_cannot_end_the_script_that_it_is_in() -> None:
    evil = "</script><script>alert(1)</script><!--{{script}}"
    path = write_run(Path("a"), settings=recipe(evil, model={"path": evil}), lines=[{"step": 1, evil: 1.0}])
    page = document([read_run(path)])
    assert page.count(evil) == 0 and page.count("<script") == 4 and "<title>&lt;/script&gt;" in page
    (run,) = data_in(page)["runs"]
    assert run["label"] == evil and run["columns"] == {evil: [1]}


def test_only_a_live_page_may_ask_its_own_server_and_has_no_samples() -> None:
    run = read_run(made_run(Path("a")))
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    assert f'content="{policy}"' in document([run])
    live = document([run], live=True)
    assert f"content=\"{policy}; connect-src 'self'\"" in live
    assert sets_in(live) == [] and data_in(live)["live"] is True and '{"live": true' in live


def test_two_that_write_at_once_do_not_spoil_each_others_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "a")
    unfinished, replace = [], Path.replace

    def look(path: Path, target: Path) -> Path:
        unfinished.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", look)
    for _ in range(2):
        write_report([tmp_path / "a"], note=lambda _: None)
    assert len(set(unfinished)) == 2
