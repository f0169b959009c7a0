"""A lock for one run in a directory, which the system releases when its process ends, however it ends."""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from gspo.errors import RunError, UserError, writing

_PATIENCE_SECONDS = 0.02  # between two attempts to take a lock
_ATTEMPTS = 25


class Lock:
    """Holds the file `lock` of a run's directory; UserError where another process does."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._descriptor: int | None = _locked(self._path)
        # A process that a reward function forks off must not hold on to it when this one is gone.
        os.register_at_fork(after_in_child=self.release)

    def check(self) -> None:
        """Raise RunError, before every write, where the lock is no longer there, alone or with its directory.

        Then another process may have the directory. Takes microseconds.
        """
        if self._descriptor is not None and not _is_at(self._descriptor, self._path):
            what = "this directory, or the lock in it, was moved, removed or replaced while it was written to"
            fix = "put it back, or name it where it is now, and go on from the newest that was saved in it: gspo resume"
            raise RunError(f"{self._path.parent}: {what}: nothing more is written\n  fix: {fix}")

    def release(self) -> None:
        """Let another process have the directory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(directory: Path) -> bool:
    """Tell whether a process on this machine has the directory's lock, that is, whether its run goes on."""
    try:
        with (directory / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or none that may be read
        return False
    return False


def _locked(path: Path) -> int:
    """A descriptor of the file, locked and with this process named in it."""
    fix = "make it writable, or name another directory (a run: output_dir; gspo eval: --out)"
    with writing(path.parent, fix):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    # What is locked after it was removed is nobody's file.
    if not (_takes_lock(descriptor) and _is_at(descriptor, path)):
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        fix = "wait for it or end it, or write to another directory (a run: output_dir; gspo eval: --out)"
        raise UserError(f"{holder} is writing to this directory", where=str(path.parent), fix=fix)
    with suppress(OSError):  # a full disk: the lock holds without a name in it
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor


def _takes_lock(descriptor: int) -> bool:
    for _ in range(_ATTEMPTS):  # whoever only asks `is_locked` has it for an instant
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(_PATIENCE_SECONDS)
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    """Tell whether the file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False
