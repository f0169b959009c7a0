"""Files of a run's directory, opened as what they should be: nothing is written through a link, no device is read."""

import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from gspo.errors import UserError


def for_writing(path: str, flags: int) -> int:
    """An opener for `open`: UserError for a link, a pipe or a device in the file's place, which may be anybody's."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # never waits for a pipe's reader
    except OSError:
        if not os.path.lexists(path) or _is_plain(os.lstat(path)):
            raise
        raise _not_plain(path) from None
    if _is_plain(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise _not_plain(path)


def for_reading(path: str, flags: int) -> int:
    """An opener for `open`: OSError for a pipe or a device, or a link to one, which might never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if _is_plain(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise OSError(0, "it is a pipe or a device, not a file", path)


def read_plain(path: Path) -> bytes:
    """A regular file's content; OSError where there is none, or something else."""
    with open(path, "rb", opener=for_reading) as file:
        return file.read()


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
        for left in path.parent.iterdir():
            if is_unfinished(left.name, path.name) and not left.is_dir():
                left.unlink()
    unfinished = path.with_name(f"unfinished_{secrets.token_hex(8)}_{path.name}")
    try:
        with open(unfinished, "x", encoding="utf-8", opener=for_writing) as file:
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


def _not_plain(path: str) -> UserError:
    what = "a link" if Path(path).is_symlink() else "a pipe or a device"
    fix = "remove it, or put a file in its place (a directory may be a link)"
    return UserError(f"this is {what}, and a run writes to its own files alone", where=path, fix=fix)


def _is_plain(about: os.stat_result) -> bool:
    """Directories too: `open` says of them what they are."""
    return stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)
