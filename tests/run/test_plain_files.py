"""Files of a run: replaced whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from gspo.run import plain_files
from gspo.run.plain_files import replace_text


def test_a_text_is_replaced_only_once_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "recipe.yaml", []
    path.write_text("old")
    (tmp_path / "unfinished_recipe.yaml").write_text("what a killed process has left of a longer text")

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


def test_a_directory_that_is_a_link_is_one_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    replace_text(tmp_path / "run" / "b", "text")
    assert {path.name: path.read_text() for path in (tmp_path / "disk").iterdir()} == {"b": "text"}
