"""A directory of files that is whole or known not to be: synced, listed with hashes, renamed into place."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from gspo.run.plain_files import clear, sync

MANIFEST = "manifest.json"


class DamagedError(Exception):
    """A directory is not what its manifest says; the message says how."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors as safetensors, not yet synced."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def copy_beginning(source: Path, target: Path, num_bytes: int) -> None:
    """The first bytes of a file that others go on appending to, not yet synced."""
    with source.open("rb") as file:
        target.write_bytes(file.read(num_bytes))


def seal(directory: Path, about: Mapping[str, Any]) -> None:
    """Sync every file, then write the manifest: `about`, and each file's size and SHA-256."""
    entries = {}
    for path in sorted(entry for entry in directory.rglob("*") if entry.is_file()):
        sync(path)
        name = path.relative_to(directory).as_posix()
        entries[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    content = {**about, "files": entries}
    text = json.dumps({"sha256": _digest(content), "content": content}, indent=1)
    (directory / MANIFEST).write_text(text, encoding="utf-8")
    sync(directory / MANIFEST)
    for folder in (*(entry for entry in directory.rglob("*") if entry.is_dir()), directory):
        sync(folder)


def move_into_place(unfinished: Path, final: Path) -> None:
    """Rename a sealed directory to its name, which makes it count, and sync the parent."""
    unfinished.rename(final)
    sync(final.parent)


def remove(directory: Path) -> None:
    """Remove a directory, under another name first, so that no half of it is ever taken for the whole."""
    doomed = directory.with_name(f"unfinished_{directory.name}")
    clear(doomed, ignore_errors=True)
    directory.rename(doomed)
    clear(doomed)


def verified(directory: Path) -> dict[str, Any]:
    """The manifest's content, where every file is as it says; raises DamagedError."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        content = manifest["content"]
        if manifest["sha256"] != _digest(content):
            raise DamagedError(f"{MANIFEST} is not as it was written")
        entries = {directory / name: entry for name, entry in content["files"].items()}
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({type(error).__name__})") from None
    for path, entry in entries.items():
        _verify_file(path, entry, name=path.relative_to(directory).as_posix())
    return dict(content)


def sha256(path: Path) -> str:
    """A file's SHA-256, read from the disk where the system lets us drop its cached bytes."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify_file(path: Path, entry: Mapping[str, Any], *, name: str) -> None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise DamagedError(f"{name} has {size:,} bytes, not {entry['bytes']:,}")
        if sha256(path) != entry["sha256"]:
            raise DamagedError(f"{name} is not as it was written (SHA-256)")
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{name} cannot be read ({error.strerror})") from None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
