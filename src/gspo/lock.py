"""One run a directory: a lock that the system lets go of when its process ends, however it ends."""

import fcntl
import os
import socket
from pathlib import Path

from gspo.errors import UserError


class Lock:
    """Holds the file `lock` of a run's directory; UserError where another process does."""

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            mend = "make the directory writable, or set output_dir"
            raise UserError(f"cannot be written: {error.strerror}", where=str(directory), mend=mend) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(self._descriptor)
            mend = "wait for it or end it, or give this run another output_dir"
            raise UserError(f"{holder} is writing to this directory", where=str(directory), mend=mend) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Let another process have the directory."""
        os.close(self._descriptor)
