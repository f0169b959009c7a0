"""The checkpoints of a run: which there are, the newest that is whole, and which may go."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.run.checkpoint.files import DamagedError, clear, move_into_place, remove, verified
from gspo.run.checkpoint.position import Position, position_of

_UNFINISHED, _DAMAGED = "unfinished_", "damaged_"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint that is whole, and those newer than it that are not, with the reason."""

    path: Path
    content: dict[str, Any]  # of its manifest
    passed_over: Sequence[tuple[Path, str]]


class Store:
    """The directory `checkpoints` of a run."""

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
        entries = self.root.iterdir() if self.root.is_dir() else ()
        return sorted(found for entry in entries if (found := position_of(entry.name)) is not None)

    def newest(self) -> Found | None:
        """The newest checkpoint that verifies; None where there is none at all.

        Raises UserError where there are some and none verifies: a run is never begun afresh over its remains.
        """
        passed_over: list[tuple[Path, str]] = []
        for position in reversed(self.positions()):
            path = self.path(position)
            try:
                return Found(path=path, content=verified(path), passed_over=passed_over)
            except DamagedError as damage:
                passed_over.append((path, str(damage)))
        if not passed_over:
            return None
        reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in passed_over)
        fix = "restore one from a copy; to begin afresh, give another output_dir or remove this run"
        raise UserError(f"no checkpoint is whole:{reasons}", where=str(self.root), fix=fix)

    def damaged(self) -> list[Path]:
        """What was passed over and set aside before."""
        return sorted(self.root.glob(f"{_DAMAGED}*"))

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep`."""
        for position in self.positions()[:-keep]:
            remove(self.path(position))

    def tidy(self, found: Found | None) -> None:
        """Remove what a killed run left unfinished, under no other names, and set aside what `found` passed over."""
        for path, _ in found.passed_over if found else ():
            aside = path.with_name(f"{_DAMAGED}{path.name}")
            if aside.exists():
                remove(aside)
            move_into_place(path, aside)
        if self.root.is_dir():
            for entry in self.root.iterdir():
                name = entry.name.removeprefix(_UNFINISHED)
                if name != entry.name and position_of(name.removeprefix(_DAMAGED)) is not None:
                    clear(entry)
