"""Files of a run's directory: replaced whole or not at all, and read while a run may still be writing them."""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.errors import UserError

FOLDERS = ROLLOUTS, EVALUATION = "rollouts", "evaluation"  # of a run: with a file of responses for each step
_STEP_FILE = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,14})\.jsonl")


def content_of(path: Path) -> bytes:
    """A file's bytes, none where there is no file; UserError where there is one that cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", where=str(path), fix="make it a file that you may read"
        ) from None


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file, none where there is no file, and how many lines are none.

    A last line without its end is still being written: neither read nor counted. Raises UserError where there is a
    file that cannot be read.
    """
    *lines, _ = content_of(path).split(b"\n")
    objects = [content for line in lines if (content := parsed(line)) is not None]
    return objects, sum(1 for line in lines if line.strip()) - len(objects)


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object that a line is; None where it is none, or nested too deep to be read."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def rollout_files(run: Path, folder: str = ROLLOUTS) -> dict[int, Path]:
    """The files of a run's responses, by step; a copy beside them, under any other name, is none."""
    named = [(_STEP_FILE.fullmatch(path.name), path) for path in (run / folder).glob("step_*.jsonl")]
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def sync(path: Path) -> None:
    """Have a file's bytes, or a directory's entries, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(path: Path) -> None:
    """Remove whatever lies at a path of ours, if anything does; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_text(path: Path, text: str, *, mark: str = "") -> None:
    """Replace a file by another text: at any instant there is the one or the other; OSError where it cannot be.

    What a killed process has left of it goes with the next text. Of several that may write at once each has its `mark`.
    """
    unfinished = path.with_name(f"unfinished_{mark}{path.name}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync(path.parent)
