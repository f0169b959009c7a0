"""Writing the page: where, of which runs, how large, whole at any instant, and what is said where it cannot be."""

import errno
import json
import os
import random
import string
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import Page, words
from tests.report.page.made_runs import begun, ended, made_run, metrics_line, recipe, sample, write_run

from gspo.errors import UserError
from gspo.report.page import arms, write
from gspo.report.page.write import document, write_report
from gspo.report.run_files import read_run


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    page = Page(Path("compared.html").read_text(encoding="utf-8"))
    assert page.all("h1")[0].text == "2 runs" and list(page.samples) == ["b", "a"]


@pytest.mark.parametrize("content", ["", "my notes", "<!DOCTYPE html><title>of something else – gspo</title>"])
def test_a_file_that_is_no_page_is_never_replaced(content: str) -> None:
    runs = [made_run(Path(name), name=name) for name in ("b", "a")]
    Path("compared.html").write_text(content)
    for error in (refused(*runs), refused(*runs[:1], out=Path("compared.html"))):
        assert error.where == "compared.html" and "no page that gspo has written" in error.what
    assert Path("compared.html").read_text() == content
    if not content:
        Path("compared.html").unlink()
        os.mkfifo("compared.html")
        assert "no page that gspo has written" in refused(*runs).what


def test_the_files_of_a_run_are_not_replaced_by_its_page() -> None:
    run = made_run(Path("a"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for path in before:
        assert "no page that gspo has written" in refused(run, out=path).what
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_another_file_may_be_named_and_an_older_page_there_is_replaced() -> None:
    made_run(Path("a"))
    Path("out").mkdir()
    for _ in range(2):
        assert write_report([Path("a")], Path("out/page.html"), note=quiet) == Path("out/page.html")
    assert Path("out/page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in Path("out").iterdir()] == ["page.html"]
    assert not Path("a/report.html").exists()
    write_report([Path("a")], Path("here.html"), note=quiet)
    assert Path("here.html").is_file()


def test_a_directory_given_twice_is_one_run_however_it_is_spelled() -> None:
    made_run(Path("a"))
    Path("link").symlink_to("a")
    write_report([Path("a"), Path("a"), Path("a/../a"), Path("a").absolute(), Path("link")], note=quiet)
    page = Page(Path("a/report.html").read_text(encoding="utf-8"))
    assert page.all("h1")[0].text == "made" and list(page.samples) == ["made"]


def test_runs_of_one_name_are_told_apart_by_their_directories() -> None:
    runs = [made_run(Path(name), name="same", seed=seed) for seed, name in enumerate(("a", "b"))]
    assert list(Page(document([read_run(path) for path in runs])).samples) == ["a", "b"]


def test_a_directory_is_no_file_to_write() -> None:
    made_run(Path("a"))
    error = refused(Path("a"), out=Path("a"))
    assert (error.what, error.where) == ("this is a directory", "a")
    Path("a/report.html").mkdir()
    assert refused(Path("a")).where == "a/report.html"


def test_a_directory_that_is_not_there_is_not_made() -> None:
    made_run(Path("a"))
    error = refused(Path("a"), out=Path("absent/page.html"))
    assert (error.what, error.where) == ("there is no such directory to write to", "absent")
    assert not Path("absent").exists()
    Path("file").touch()
    assert refused(Path("a"), out=Path("file/page.html")).where == "file"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_what_cannot_be_written_is_said_and_nothing_is_left(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any, flags: int = 0, mode: int = 0) -> int:
        if flags & os.O_CREAT or number == errno.ENOSPC:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, mode)

    opened = os.open
    made_run(Path("a"))
    before = sorted(Path("a").iterdir())
    monkeypatch.setattr(os, "fsync" if number == errno.ENOSPC else "open", fail)
    if number == errno.EROFS:
        monkeypatch.setattr(Path, "unlink", fail)
    error = refused(Path("a"))
    assert error.what == f"cannot be written: {os.strerror(number)}" and error.where == "a/report.html"
    assert sorted(Path("a").iterdir()) == before


def test_a_name_that_no_file_can_have_is_said() -> None:
    made_run(Path("a"))
    assert "File name too long" in refused(Path("a"), out=Path("x" * 300)).what
    assert "File name too long" in refused(Path("a"), out=Path("x" * 250)).what  # while it is unfinished
    assert refused(Path("a"), out=Path("x" * 300, "y")).what == "there is no such directory to write to"
    assert refused(Path("x" * 300)).what == "no such directory"


def test_until_the_page_is_whole_the_old_one_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(Path("a"))
    Path("a/report.html").write_text("old")
    seen, replace = [], Path.replace

    def look(path: Path, target: Path) -> Path:
        seen.append((path.parent, Path("a/report.html").read_text(), path.read_text(encoding="utf-8")[-8:].strip()))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", look)
    write_report([Path("a")], note=quiet)
    assert seen == [(Path("a"), "old", "</html>")]


@pytest.mark.parametrize("spoil", ["missing", "no recipe", "not a run", "checkpoint", "file"])
def test_what_is_no_run_is_said_before_anything_is_written(spoil: str) -> None:
    made_run(Path("good"))
    path = Path("bad")
    if spoil != "missing":
        path.mkdir()
    if spoil == "not a run":
        (path / "recipe.yaml").write_text("soup: of the day\n")
    if spoil == "checkpoint":
        (path / "manifest.json").touch()
    if spoil == "file":
        path = path / "x.txt"
        path.touch()
    for paths, out in (((path,), None), ((path, Path("good")), None), ((Path("good"), path), Path("p.html"))):
        assert refused(*paths, out=out).where in (str(path), str(path / "recipe.yaml"))
    assert not [*Path().rglob("*.html")]


def test_a_run_of_one_step_and_one_of_none_have_their_pages() -> None:
    write_report([made_run(Path("one"), steps=1)], note=quiet)
    page = Page(Path("one/report.html").read_text(encoding="utf-8"))
    assert page.figures["charts"] and [len(steps) for steps in page.samples.values()] == [1]
    write_report([write_run(Path("none"), history=[begun()])], note=quiet)
    page = Page(Path("none/report.html").read_text(encoding="utf-8"))
    assert page.figures["charts"] == [] and page.figures["others"] == {}
    assert "no step is done" in page.by_id("curves").text and "There are no samples yet." in page.by_id("samples").text
    assert "still running: 0 of 6 steps so far" in page.by_id("overview").text


def random_samples(num_steps: int, num_rollouts: int, letters: int) -> dict[int, list[dict[str, Any]]]:
    """Groups of eight; about half of the text is random."""
    rng = random.Random(0)
    text = "".join(rng.choices(string.ascii_letters, k=10**5))

    def words(step: int, place: int) -> list[str]:
        start = rng.randrange(len(text) - letters)
        return [text[start : start + letters], f" {step}.{place}"]

    return {
        step: [sample(f"q:{place // 8}", "p", words=words(step, place)) for place in range(num_rollouts)]
        for step in range(1, num_steps + 1)
    }


@pytest.mark.parametrize(("num_steps", "num_rollouts"), [(1, 64), (40, 64), (300, 8)])
def test_a_page_is_never_larger_than_it_may_be(
    num_steps: int, num_rollouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = [metrics_line(step) for step in range(num_steps + 1)]
    path = write_run(Path("a"), lines=log, samples=random_samples(num_steps, num_rollouts, letters=80))
    run, plenty = read_run(path), 10**8
    monkeypatch.setattr(write, "MAX_BYTES", plenty)
    whole = document([run])
    assert "All samples of" in whole and "Thinned" not in whole
    without = len(document([read_run(write_run(Path("b"), lines=log))]).encode())
    for share in (0.9, 0.5, 0.1):
        most = without + int(share * (len(whole.encode()) - without))
        monkeypatch.setattr(write, "MAX_BYTES", most)
        text = document([run])
        assert len(text.encode()) <= most
        assert "Thinned" in text or "No group is small enough" in text


def test_where_the_rest_takes_all_the_room_the_page_has_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "MAX_BYTES", 1000)
    page = Page(document([read_run(made_run(Path("a")))]))
    assert list(page.samples.values()) == [[]] and page.figures["charts"]
    assert "No group is small enough for this page" in page.by_id("samples").text


def test_several_runs_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        read_run(write_run(Path(name), settings=recipe(name), samples=random_samples(10, 32, 80))) for name in "abc"
    ]
    without = len(document([read_run(write_run(Path(name), settings=recipe(name))) for name in "xyz"]).encode())
    monkeypatch.setattr(write, "MAX_BYTES", without + 60_000)
    text = document(runs)
    assert len(text.encode()) <= without + 60_000
    counts = [sum(len(step["queries"]) for step in steps) for steps in Page(text).samples.values()]
    assert min(counts) > 0 and max(counts) <= 2 * min(counts)


def test_a_long_run_is_said_to_be_drawn_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(made_run(Path("a")))
    assert "evenly spread, are drawn" not in document([run])
    for module in (write, arms):
        monkeypatch.setattr(module, "MOST_STEPS", 3)
    assert "Of 7 steps about 3, evenly spread, are drawn; all are in metrics.jsonl." in words(document([run]))


def test_the_steps_after_which_a_run_was_resumed_are_marked() -> None:
    history = [begun(), ended("stopped"), begun(event="resumed"), ended(), begun(event="resumed", step=3), ended()]
    path = write_run(Path("a"), lines=[metrics_line(1)], history=history)
    assert Page(document([read_run(path)])).figures["resumed"] == [3]
    other = made_run(Path("b"), name="b")
    assert Page(document([read_run(path), read_run(other)])).figures["resumed"] == []


def test_what_has_no_encoding_does_not_spoil_the_page() -> None:
    path = write_run(Path(os.fsdecode(b"caf\xe9")), samples={1: []})
    line = json.dumps(sample("\ud83d", prompt="é\ud83d"))
    (path / "rollouts" / "step_000001.jsonl").write_text(line + "\n", encoding="utf-8")
    target = write_report([path], note=quiet)
    page = Page(target.read_text(encoding="utf-8"))
    (((group,),),) = [[step["groups"] for step in steps] for steps in page.samples.values()]
    assert group["prompt"] == "é\ud83d"
