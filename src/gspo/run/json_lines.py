"""Logs of a line a step, and files of a line a rollout, read while a run may still be writing them."""

import json
import os
import re
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.run.plain_files import read_plain

_ROLLOUTS = re.compile(r"step_([0-9]{6,15})\.jsonl")


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file, none where there is no file, and how many lines are none.

    A last line without its end is still being written: neither read nor counted. Raises UserError where there is a
    file that cannot be read.
    """
    *lines, _ = content_of(path).split(b"\n")
    found = [content for line in lines if (content := parsed(line)) is not None]
    return found, sum(1 for line in lines if line.strip()) - len(found)


def content_of(path: Path) -> bytes:
    """A file's bytes, none where there is no file; UserError where there is one that cannot be read."""
    try:
        return read_plain(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        fix = "make it a file that you may read"
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object that a line is; None where it is none, or nested too deep to be read."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def rollout_files(run: Path) -> dict[int, Path]:
    """By step, the files of a run's rollouts; a copy beside them, under any other name, is none."""
    files = {}
    for path in (run / "rollouts").glob("step_*.jsonl"):
        name = _ROLLOUTS.fullmatch(path.name)
        if name and path.name == f"step_{int(name[1]):06d}.jsonl" and os.path.isfile(path):  # noqa: PTH113 - Path's raises
            files[int(name[1])] = path
    return dict(sorted(files.items()))
