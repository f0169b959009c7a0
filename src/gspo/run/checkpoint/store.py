"""The checkpoints of a phase: which there are, the newest that is whole, and which may go."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.run.checkpoint.files import DamagedError, move_into_place, remove, verified
from gspo.run.checkpoint.position import Position, position_of
from gspo.run.plain_files import clear

STATE, TENSORS, RECIPE = "state.json", "state.safetensors", "recipe.yaml"
_UNFINISHED, _DAMAGED = "unfinished_", "damaged_"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is whole, and those newer than it that are not, with the reason."""

    path: Path
    manifest: dict[str, Any]  # what it says, verified
    damaged: Sequence[tuple[Path, str]] = ()


class Store:
    """A directory of checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def unfinished(self, position: Position) -> Path:
        """Where a checkpoint is written before it counts."""
        return self.root / f"{_UNFINISHED}{position.name}"

    def path(self, position: Position) -> Path:
        """Where a checkpoint lies once it counts."""
        return self.root / position.name

    def positions(self) -> list[Position]:
        """Of all checkpoints, whole or not, the oldest first."""
        names = [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []
        return sorted(position for name in names if (position := position_of(name)) is not None)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; None where there is none at all.

        Raises UserError where there are some and none verifies: a run is never begun afresh over its remains.
        """
        damaged: list[tuple[Path, str]] = []
        for position in reversed(self.positions()):
            path = self.path(position)
            try:
                return Checkpoint(path=path, manifest=verified(path), damaged=damaged)
            except DamagedError as error:
                damaged.append((path, str(error)))
        if not damaged:
            return None
        reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in damaged)
        fix = "restore one from a copy; to begin afresh, give another output_dir or remove this run"
        raise UserError(f"no checkpoint is whole:{reasons}", where=str(self.root), fix=fix)

    def others(self) -> list[str]:
        """The names of those that were set aside as damaged, or that another version of gspo has made."""
        names = [path.name for path in self.root.glob("*_[0-9]*") if not path.name.startswith(_UNFINISHED)]
        return sorted(name for name in names if position_of(name) is None)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep`."""
        for position in self.positions()[:-keep]:
            remove(self.path(position))

    def tidy(self, damaged: Sequence[tuple[Path, str]]) -> None:
        """Remove what a killed run left unfinished, under no other names, and set aside what is damaged."""
        for path, _ in damaged:
            aside = path.with_name(f"{_DAMAGED}{path.name}")
            if aside.exists():
                remove(aside)
            move_into_place(path, aside)
        for entry in self.root.iterdir() if self.root.is_dir() else ():
            name = entry.name.removeprefix(_UNFINISHED)
            if name != entry.name and position_of(name.removeprefix(_DAMAGED)) is not None:
                clear(entry)
