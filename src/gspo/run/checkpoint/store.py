"""Checkpoints on the disk: each whole or known not to be; named and ordered by how far the run was, whatever the clock.

A checkpoint is a directory. Its files are synced and listed with their hashes before it is renamed to its name.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.run.plain_files import clear, sync

CHECKPOINTS = "checkpoints"  # of reinforcement learning
COLD_CHECKPOINTS = "cold_start_checkpoints"  # while the cold start is under way
COLD_START = "cold_start"  # what the cold start has ended with: a checkpoint with its model
MANIFEST, RECIPE, STATE = "manifest.json", "recipe.yaml", "state.json"
_UNFINISHED, _DAMAGED = "unfinished_", "damaged_"
_WITHIN = ("", "batch", "updated")  # how far a step under way is, in names
_NAME = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,})(?:_(batch|updated))?")


@dataclass(frozen=True, order=True)
class Position:
    """The place that a phase of a run has come to; it names and orders the checkpoints.

    Example: Position(12, 1) is `step_000012_batch`: 12 steps are finished, and step 13 has its batch.
    """

    steps: int  # that are finished
    stage: int = 0  # 1 once the next step's batch is sampled and scored, 2 once the policy is trained on it

    @property
    def name(self) -> str:
        """The name of a checkpoint made here: `step_000012`, `step_000012_batch` or `step_000012_updated`."""
        return f"step_{self.steps:06d}{'_' * bool(self.stage)}{_WITHIN[self.stage]}"

    def __str__(self) -> str:
        return f"step {self.steps + bool(self.stage)}{', ' * bool(self.stage)}{_WITHIN[self.stage]}"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is whole, and those newer than it that are not, with the reason.

    Example: Checkpoint(path=root / "step_000012", manifest={"weights_sha256": …, "files": …})
    """

    path: Path
    manifest: Mapping[str, Any]  # its content, verified
    damaged: Sequence[tuple[Path, str]] = ()

    @property
    def is_cold_start(self) -> bool:
        """Tell whether it is of the cold start: under way, or finished."""
        return self.path.name == COLD_START or self.path.parent.name == COLD_CHECKPOINTS


class DamagedError(Exception):
    """A directory is not what its manifest says; the message says how."""


class Store:
    """A directory of checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def unfinished(self, position: Position) -> Path:
        """Return where a checkpoint is written before it counts."""
        return self.root / f"{_UNFINISHED}{position.name}"

    def path(self, position: Position) -> Path:
        """Return where a checkpoint lies once it counts."""
        return self.root / position.name

    def positions(self) -> list[Position]:
        """The positions of all checkpoints, whole or not, the oldest first."""
        return sorted(filter(None, map(position_of, self._names())))

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
        return sorted(name for name in self._names() if name.startswith(("step_", _DAMAGED)) and not position_of(name))

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep`."""
        for position in self.positions()[:-keep]:
            remove(self.path(position))

    def tidy(self) -> None:
        """Remove what a killed run left unfinished, under no other names."""
        for name in self._names():
            if name.startswith((f"{_UNFINISHED}step_", f"{_UNFINISHED}{_DAMAGED}step_")):
                clear(self.root / name)

    def _names(self) -> list[str]:
        return [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []


def finished_cold_start(run: Path) -> Checkpoint | None:
    """Return what the cold start of a run has ended with; None where it has not, UserError where that is not whole."""
    path = run / COLD_START
    try:
        return Checkpoint(path=path, manifest=verified(path)) if path.exists() else None
    except DamagedError as damage:
        fix = "restore it from a copy: it is the reference model too; to begin afresh, give another output_dir"
        raise UserError(f"what the cold start ended with is not whole: {damage}", where=str(path), fix=fix) from None


def position_of(name: str) -> Position | None:
    """The position of a checkpoint's name; None for any other name, such as `step_99`."""
    match = _NAME.fullmatch(name)
    return Position(int(match[1]), _WITHIN.index(match[2] or "")) if match else None


def seal(directory: Path, about: Mapping[str, Any]) -> None:
    """Sync everything in a directory, then write the manifest: `about`, and each file's size and SHA-256."""
    files = {}
    for path in sorted(directory.rglob("*")):
        sync(path)
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": digest_of_file(path)}
    content = {**about, "files": files}
    text = json.dumps({"sha256": _digest_of_content(content), "content": content}, indent=1)
    (directory / MANIFEST).write_text(text, encoding="utf-8")
    sync(directory / MANIFEST)
    sync(directory)


def verified(directory: Path) -> dict[str, Any]:
    """The manifest's content, where every file is as it says; raises DamagedError."""
    name = MANIFEST
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        content: dict[str, Any] = manifest["content"]
        if manifest["sha256"] != _digest_of_content(content):
            raise DamagedError(f"{MANIFEST} is not as it was written")
        for name, entry in content["files"].items():
            size = (directory / name).stat().st_size
            if size != entry["bytes"]:
                raise DamagedError(f"{name} has {size:,} bytes, not {entry['bytes']:,}")
            if digest_of_file(directory / name) != entry["sha256"]:
                raise DamagedError(f"{name} is not as it was written (SHA-256)")
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise DamagedError(f"{name} cannot be read ({reason})") from None
    return content


def move_into_place(unfinished: Path, final: Path) -> None:
    """Rename a sealed directory to its name, which makes it count, and sync the parent."""
    unfinished.rename(final)
    sync(final.parent)


def set_aside(damaged: Path) -> None:
    """Rename a damaged checkpoint, so that it counts no more, in the place of an earlier one of that name."""
    aside = damaged.with_name(f"{_DAMAGED}{damaged.name}")
    if aside.exists():
        remove(aside)
    move_into_place(damaged, aside)


def remove(directory: Path) -> None:
    """Remove a directory, under another name first, so that no half of it is ever taken for the whole."""
    doomed = directory.with_name(f"{_UNFINISHED}{directory.name}")
    clear(doomed)
    directory.rename(doomed)
    clear(doomed)


def digest(parts: Iterable[bytes]) -> str:
    """SHA-256 over bytes, one after the other."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 of what is on the disk, where the system lets us drop its cached bytes."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_content(content: Any) -> str:
    return digest([json.dumps(content, sort_keys=True).encode()])
