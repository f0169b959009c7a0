"""A sealed directory: synced before it counts, and whatever is done to it afterwards is found."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.run.checkpoint import store
from gspo.run.checkpoint.store import (
    MANIFEST,
    DamagedError,
    move_into_place,
    remove,
    seal,
    verified,
)

ABOUT = {"weights_sha256": "0", "environment": {"torch": "2.11"}}
Flip = Callable[[Path, int], None]


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    directory = tmp_path / "sealed"
    (directory / "model").mkdir(parents=True)
    (directory / "state.json").write_text('{"step": 3}')
    (directory / "empty").write_text("")
    (directory / "model" / "weights").write_bytes(bytes(range(16)))
    seal(directory, ABOUT)
    return directory


def test_a_directory_as_it_was_sealed_gives_back_what_was_said_about_it(sealed: Path) -> None:
    content = verified(sealed)
    assert {key: content[key] for key in ABOUT} == ABOUT
    assert sorted(content["files"]) == ["empty", "model/weights", "state.json"]
    assert content["files"]["model/weights"]["bytes"] == 16


@pytest.mark.parametrize("name", ["state.json", "model/weights"])
def test_a_flipped_bit_in_any_byte_of_any_file_is_found_and_named(name: str, sealed: Path, flip: Flip) -> None:
    path = sealed / name
    for byte in range(path.stat().st_size):
        for bit in (8 * byte, 8 * byte + 3, 8 * byte + 7):
            flip(path, bit)
            with pytest.raises(DamagedError, match=f"{name} is not as it was written"):
                verified(sealed)
            flip(path, bit)
    verified(sealed)


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path: Path, flip: Flip) -> None:
    (tmp_path / "state.json").write_text("{}")
    seal(tmp_path, ABOUT)
    manifest = tmp_path / MANIFEST
    for bit in range(8 * manifest.stat().st_size):
        flip(manifest, bit)
        with pytest.raises(DamagedError, match=MANIFEST):
            verified(tmp_path)
        flip(manifest, bit)
    verified(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "model/weights", "empty", MANIFEST])
def test_a_missing_a_truncated_an_emptied_and_a_longer_file_are_found(name: str, sealed: Path) -> None:
    path = sealed / name
    content = path.read_bytes()
    for other in [*(content[:size] for size in range(len(content))), content + b"\0", content + b"}"]:
        path.write_bytes(other)
        with pytest.raises(DamagedError, match=name):
            verified(sealed)
    path.unlink()
    with pytest.raises(DamagedError, match=f"{name} is missing"):
        verified(sealed)
    path.mkdir()
    with pytest.raises(DamagedError, match=name):
        verified(sealed)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "3", '{"sha256": 1, "content": {}}', '{"content": 0}', "\0", "[" * 10**5]
)
def test_a_manifest_that_is_none_is_damage_and_no_other_error(text: str, sealed: Path) -> None:
    (sealed / MANIFEST).write_text(text)
    with pytest.raises(DamagedError, match=MANIFEST):
        verified(sealed)


def test_a_directory_without_a_manifest_or_without_anything_is_damaged(tmp_path: Path) -> None:
    for directory in (tmp_path / "absent", tmp_path):
        with pytest.raises(DamagedError, match="missing"):
            verified(directory)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What has been synced so far."""
    paths: list[Path] = []
    sync = store.sync

    def noting(path: Path) -> None:
        paths.append(path)
        sync(path)

    monkeypatch.setattr(store, "sync", noting)
    return paths


def test_everything_is_on_the_disk_before_a_directory_counts_and_its_name_after(
    tmp_path: Path, synced: list[Path]
) -> None:
    unfinished, final = tmp_path / "unfinished", tmp_path / "final"
    (unfinished / "model" / "deep").mkdir(parents=True)
    for path in ("a", "model/b", "model/deep/c"):
        (unfinished / path).write_text(path)
    seal(unfinished, {})
    assert set(synced) == {unfinished, *unfinished.rglob("*")}
    synced.clear()
    move_into_place(unfinished, final)
    assert synced == [tmp_path] and not unfinished.exists()
    verified(final)


def test_a_removal_that_is_broken_off_leaves_nothing_under_the_name(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(directory: Path) -> None:
        next(path for path in directory.rglob("*") if path.is_file()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", broken_off)
        with pytest.raises(KeyboardInterrupt):
            remove(sealed)
    assert not sealed.exists()
    sealed.mkdir()
    remove(sealed)
    assert list(sealed.parent.iterdir()) == []
