"""Files of a run's directory: replaced whole or not at all, and read where they have an end.

Logs of a line a step, and files of a line a rollout, are read while a run may still be writing them.
"""

import json
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.errors import UserError

FOLDERS = ROLLOUTS, EVALUATION = "rollouts", "evaluation"  # of a run: with a file of responses for each step
_STEP_FILE = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,14})\.jsonl")


def for_reading(path: str, flags: int) -> int:
    """An opener for `open`: OSError for a pipe or a device, or a link to one, which might never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)  # never waits for the other end of a pipe
    if _is_plain(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise OSError(0, "it is a pipe or a device, not a file", path)


def read_plain(path: Path) -> bytes:
    """A regular file's content; OSError where there is none, or something else."""
    with open(path, "rb", opener=for_reading) as file:
        return file.read()


def content_of(path: Path) -> bytes:
    """A file's bytes, none where there is no file; UserError where there is one that cannot be read."""
    try:
        return read_plain(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        fix = "make it a file that you may read"
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None


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
    """By step, the files of a run's responses; a copy beside them, under any other name, is none."""
    named = [(_STEP_FILE.fullmatch(path.name), path) for path in (run / folder).glob("step_*.jsonl")]
    files = {int(name[1]): path for name, path in named if name and os.path.isfile(path)}  # noqa: PTH113 - Path's raises
    return dict(sorted(files.items()))


def sync(path: Path) -> None:
    """Have a file's bytes, or a directory's entries, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove whatever lies at a path of ours, if anything does; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def replace_text(path: Path, text: str, *, is_only_writer: bool = True) -> None:
    """Replace a file by another text: at any instant there is the one or the other; OSError where it cannot be.

    It is written under a name that nobody can have put a link at, which only a kill leaves behind. The only writer
    of a file removes what was left of it so; another one cannot tell that from what is being written.
    """
    if is_only_writer:
        for entry in path.parent.iterdir():
            if is_unfinished(entry.name, path.name) and not entry.is_dir():
                entry.unlink()
    unfinished = path.with_name(f"unfinished_{secrets.token_hex(8)}_{path.name}")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync(path.parent)


def is_unfinished(name: str, of: str) -> bool:
    """Whether a file's name is one that `replace_text` writes a file under."""
    return re.fullmatch(rf"unfinished_[0-9a-f]{{16}}_{re.escape(of)}", name) is not None


def _is_plain(about: os.stat_result) -> bool:
    """Directories too: `open` says of them what they are."""
    return stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)
