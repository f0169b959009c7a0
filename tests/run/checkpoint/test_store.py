"""The checkpoints of a run: the newest that is whole, what is said of those that are not, and which may go."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.run.checkpoint import store as store_module
from gspo.run.checkpoint.store import Position, Store, set_aside

Put = Callable[[Position], Path]
IN_ORDER = [Position(0), Position(7, 1), Position(7, 2), Position(8), Position(9, 2), Position(10)]


def tidy(store: Store) -> None:
    found = store.newest()
    assert found is not None
    for path, _ in found.damaged:
        set_aside(path)
    store.tidy()


def test_there_is_none_where_nothing_was_finished(store: Store) -> None:
    assert store.newest() is None and store.positions() == []
    store.unfinished(Position(3)).mkdir(parents=True)
    (store.root / "notes").write_text("mine")
    assert store.newest() is None and store.positions() == []
    store.prune(1)
    store.tidy()
    assert [path.name for path in store.root.iterdir()] == ["notes"]


def test_the_newest_is_that_of_the_farthest_position_whatever_the_files_dates(store: Store, put: Put) -> None:
    shuffled = random.Random(1).sample(IN_ORDER, len(IN_ORDER))
    for position in shuffled:
        put(position)
    assert store.positions() == IN_ORDER
    for position in reversed(IN_ORDER):
        found = store.newest()
        assert found is not None and found.path == store.path(position) and not found.damaged
        assert found.manifest["made"] == shuffled.index(position)
        store.path(position).rename(store.root / f"elsewhere {position.name}")


def test_those_that_are_not_whole_are_passed_over_with_their_reasons_and_set_aside(
    store: Store, put: Put, flip: Any, tree: Any
) -> None:
    old, whole, no_manifest, flipped = (put(Position(step)) for step in (1, 2, 3, 4))
    (no_manifest / "manifest.json").unlink()
    flip(flipped / "model" / "weights", 5)
    before = tree(store.root)
    found = store.newest()
    assert found is not None and found.path == whole
    assert [path for path, _ in found.damaged] == [flipped, no_manifest]
    assert "model/weights" in found.damaged[0][1] and "missing" in found.damaged[1][1]
    assert tree(store.root) == before  # looking changes nothing
    content = tree(flipped)
    for path, _ in found.damaged:
        set_aside(path)
    store.tidy()
    assert {path.name for path in store.root.iterdir()} == {
        old.name,
        whole.name,
        f"damaged_{flipped.name}",
        f"damaged_{no_manifest.name}",
    }
    assert tree(store.root / f"damaged_{flipped.name}") == content
    again = store.newest()
    assert again is not None and again.path == whole and not again.damaged


def test_what_is_damaged_a_second_time_takes_the_place_of_the_first(
    store: Store, put: Put, flip: Any, tree: Any
) -> None:
    put(Position(1))
    for bit in (0, 9):
        flip(put(Position(2)) / "state.json", bit)
        content = tree(store.path(Position(2)))
        tidy(store)
        assert tree(store.root / "damaged_step_000002") == content


def test_where_none_is_whole_that_is_said_of_each_and_all_is_left_as_it_is(
    store: Store, put: Put, flip: Any, tree: Any
) -> None:
    flip(put(Position(1)) / "state.json", 0)
    (put(Position(2)) / "model" / "weights").unlink()
    before = tree(store.root)
    with pytest.raises(UserError) as caught:
        store.newest()
    message = str(caught.value)
    assert "step_000001: state.json is not as it was written" in message
    assert "step_000002: model/weights is missing" in message
    assert str(store.root) in message
    assert tree(store.root) == before


def test_pruning_keeps_the_newest_and_whatever_is_no_checkpoint(store: Store, put: Put) -> None:
    for position in random.Random(2).sample(IN_ORDER, len(IN_ORDER)):
        put(position)
    others = {"damaged_step_000099", "notes", "step_000012_update_2"}  # the last of an earlier version
    for name in others:
        (store.root / name).mkdir()
    for keep in (6, 3, 2, 1):
        store.prune(keep)
        assert store.positions() == IN_ORDER[-keep:]
    assert {path.name for path in store.root.iterdir()} == {"step_000010", *others}
    assert store.others() == ["damaged_step_000099", "step_000012_update_2"]
    found = store.newest()
    assert found is not None and found.path.name == "step_000010"


def test_tidying_removes_what_a_killed_run_left_unfinished(store: Store, put: Put) -> None:
    put(Position(1))
    (store.unfinished(Position(2)) / "model").mkdir(parents=True)
    (store.unfinished(Position(2)) / "model" / "half").write_text("x")
    tidy(store)
    assert [path.name for path in store.root.iterdir()] == ["step_000001"]


def test_tidying_leaves_alone_what_is_not_its_own_and_follows_no_link(store: Store, put: Put, tmp_path: Path) -> None:
    put(Position(1))
    put(Position(99)).rename(store.root / "step_99")  # by hand
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes").write_text("mine")
    (store.root / "unfinished_thoughts").symlink_to(tmp_path / "precious")
    (store.root / "unfinished_notes").write_text("mine")
    (store.root / "unfinished_step_000002").symlink_to(tmp_path / "precious")
    (store.root / "unfinished_damaged_step_000003").mkdir()
    tidy(store)
    kept = {"step_000001", "step_99", "unfinished_thoughts", "unfinished_notes"}
    assert {path.name for path in store.root.iterdir()} == kept
    assert (tmp_path / "precious" / "notes").read_text() == "mine"
    (store.root / "step_000000").symlink_to(tmp_path / "precious")
    store.prune(1)
    assert {path.name for path in store.root.iterdir()} == kept
    assert (tmp_path / "precious" / "notes").read_text() == "mine"


def test_an_unfinished_one_that_was_about_to_count_is_not_taken_for_one(
    store: Store, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(Position(1))
    put(Position(2)).rename(store.unfinished(Position(2)))
    assert store.positions() == [Position(1)]
    monkeypatch.setattr(store_module, "remove", lambda directory: pytest.fail(str(directory)))
    store.prune(1)
