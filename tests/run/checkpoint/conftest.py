"""Checkpoints of a few bytes, and one bit of a file turned over."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.run.checkpoint.store import Position, Store, move_into_place, seal


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty one; its directory is not made yet."""
    return Store(tmp_path / "checkpoints")


@pytest.fixture
def put(store: Store) -> Callable[[Position], Path]:
    """Make a checkpoint of two small files at a position; the earlier it is made, the later its files' dates."""
    made: list[Path] = []

    def make(position: Position) -> Path:
        unfinished = store.unfinished(position)
        unfinished.joinpath("model").mkdir(parents=True)
        unfinished.joinpath("state.json").write_text(position.name)
        unfinished.joinpath("model", "weights").write_bytes(bytes(range(8)))
        seal(unfinished, {"made": len(made)})
        move_into_place(unfinished, store.path(position))
        made.append(store.path(position))
        os.utime(made[-1], (2_000_000_000 - len(made), 2_000_000_000 - len(made)))
        return made[-1]

    return make


@pytest.fixture(scope="session")
def flip() -> Callable[[Path, int], None]:
    """Turn over one bit of a file."""

    def turn(path: Path, bit: int) -> None:
        content = bytearray(path.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)

    return turn


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, bytes | None]]:
    """Every entry below a directory, with its content where it is a file."""

    def read(root: Path) -> dict[str, bytes | None]:
        entries = sorted(root.rglob("*"))
        return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in entries}

    return read
