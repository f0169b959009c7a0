"""One run a directory: a lock that the system lets go of when its process ends, however it ends."""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from gspo.errors import UserError


class Lock:
    """Holds the file `lock` of a run's directory; UserError where another process does."""

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        self._descriptor: int | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            mend = "make the directory writable, or set output_dir"
            raise UserError(f"cannot be written: {error.strerror}", where=str(directory), mend=mend) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            mend = "wait for it or end it, or give this run another output_dir"
            raise UserError(f"{holder} is writing to this directory", where=str(directory), mend=mend) from None
        with suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor
        # A process that a reward function forks off must not hold on to it when this one is gone.
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Let another process have the directory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
