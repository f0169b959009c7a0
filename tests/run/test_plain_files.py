"""Files of a run: replaced whole or not at all, written under their own names alone, read where they have an end."""

import os
import stat
from pathlib import Path

import pytest

from gspo.run import plain_files
from gspo.run.plain_files import for_reading, is_unfinished, read_plain, replace_text


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that links point at."""
    path = tmp_path / "precious"
    path.write_text("precious")
    return path


def test_a_text_is_replaced_only_once_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "recipe.yaml", []
    path.write_text("old")

    def noting(synced: Path) -> None:
        seen.append((synced == tmp_path, synced.read_text() if synced.is_file() else "", path.read_text()))

    monkeypatch.setattr(plain_files, "sync", noting)
    replace_text(path, "new é")
    assert seen == [(False, "new é", "old"), (True, "", "new é")]
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_text_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("old")

    def fail(synced: Path) -> None:
        raise error

    monkeypatch.setattr(plain_files, "sync", fail)
    with pytest.raises(type(error)):
        replace_text(path, "new")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_replaced_text_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        replace_text(tmp_path / "a", "text")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_the_name_that_a_text_is_written_under_is_never_the_same_and_no_link_there_is_followed(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    monkeypatch.setattr(plain_files, "sync", lambda path: names.append(path.name))
    for _ in range(3):
        replace_text(tmp_path / "a", "text")
    written = [name for name in names if name != tmp_path.name]
    assert len(set(written)) == 3 and all(is_unfinished(name, "a") for name in written)
    monkeypatch.setattr(plain_files.secrets, "token_hex", lambda _: "0" * 16)  # as if it could be guessed
    (tmp_path / f"unfinished_{'0' * 16}_b").symlink_to(precious)
    with pytest.raises(FileExistsError):
        replace_text(tmp_path / "b", "text", is_only_writer=False)
    assert precious.read_text() == "precious"


def test_a_link_in_the_place_of_a_text_is_replaced_and_not_followed(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "a").symlink_to(precious)
    replace_text(tmp_path / "a", "text")
    assert not (tmp_path / "a").is_symlink() and (tmp_path / "a").read_text() == "text"
    assert precious.read_text() == "precious"


def test_what_a_killed_process_has_left_goes_with_the_next_text_and_nothing_else_does(
    tmp_path: Path, precious: Path
) -> None:
    left = [f"unfinished_{number:016x}_a" for number in range(2)]
    others = ["unfinished_a", f"unfinished_{0:016x}_b", f"unfinished_{0:016x}_a.txt", "unfinished_notes_a"]
    (tmp_path / left[0]).symlink_to(precious)
    for name in (left[1], *others):
        (tmp_path / name).touch()
    replace_text(tmp_path / "a", "text", is_only_writer=False)  # another one may be writing those
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "precious", *left, *others}
    replace_text(tmp_path / "a", "text")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "precious", *others}
    assert precious.read_text() == "precious"


def test_a_directory_that_is_a_link_is_one_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    replace_text(tmp_path / "run" / "b", "text")
    assert {path.name: path.read_text() for path in (tmp_path / "disk").iterdir()} == {"b": "text"}


def test_other_errors_are_as_ever(tmp_path: Path) -> None:
    for path, error in ((tmp_path / "absent" / "a", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error):
            open(path, opener=for_reading)  # noqa: SIM115


def test_a_file_is_read_through_links_and_what_has_no_end_is_not(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "link").symlink_to(precious)
    assert read_plain(tmp_path / "link") == b"precious"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="a pipe or a device"):
            read_plain(tmp_path / name)
