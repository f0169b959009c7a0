"""Checkpoints written while training goes on."""

import errno
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from safetensors import SafetensorError

from gspo.errors import RunError
from gspo.recipe.schema import CheckpointConfig
from gspo.run.checkpoint.files import DamagedError
from gspo.run.checkpoint.position import Position
from gspo.run.checkpoint.snapshot import Snapshot, write
from gspo.run.checkpoint.store import Store

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class Writer:
    """Takes snapshots when they are due and has a thread write them, one at a time."""

    def __init__(self, store: Store, settings: CheckpointConfig) -> None:
        self.store = store
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._taken_at = time.monotonic()  # never the wall clock, which may be set back

    def is_due(self, position: Position) -> bool:
        """Whether a checkpoint is to be made here: every so many whole steps, and so many seconds after the last."""
        every, seconds = self._settings.every, self._settings.seconds
        if every and position.stage == 0 and position.steps > 0 and position.steps % every == 0:
            return True
        return seconds is not None and time.monotonic() - self._taken_at >= seconds

    def save(self, position: Position, take: Callable[[], Snapshot]) -> None:
        """Have a snapshot written; waits for the one before, takes a copy, and does not wait for its writing.

        Raises RunError where the one before has failed. What lies there already, whole, is not written again.
        """
        self.wait()
        self._taken_at = time.monotonic()
        if self.store.path(position).exists():
            return
        snapshot = take()
        self._thread = threading.Thread(target=self._work, args=(snapshot,), name="checkpoint writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written; RunError where that has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """RunError where a checkpoint has failed to be written; said once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self, snapshot: Snapshot) -> None:
        try:
            write(snapshot, self.store)
        except Exception as error:
            self._failure = RunError(f"the checkpoint of {snapshot.position} could not be written: {error}")
            with suppress(OSError):  # the disk may be gone altogether
                self._failure = self._explained(error, snapshot)
            return
        try:
            self.store.prune(self._settings.keep)
        except OSError as error:
            self._failure = RunError(f"the checkpoint of {snapshot.position} is whole, but an old one stays: {error}")

    def _explained(self, error: Exception, snapshot: Snapshot) -> RunError:
        needed, free = snapshot.num_bytes, shutil.disk_usage(self.store.root.parent).free
        shutil.rmtree(self.store.unfinished(snapshot.position), ignore_errors=True)
        return RunError(
            f"the checkpoint of {snapshot.position} could not be written: {_reason(error, needed, free)}\n"
            f"  where: {self.store.root}; {self._what_is_left(snapshot.position)}"
        )

    def _what_is_left(self, position: Position) -> str:
        left = [one for one in self.store.positions() if one != position]
        return f"the one before, {left[-1].name}, is untouched: fix this, then resume" if left else "there is no other"


def _reason(error: Exception, needed: int, free: int) -> str:
    if isinstance(error, RunError | DamagedError):
        return str(error)
    no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
    # safetensors hands the system's message on, but no number.
    no_room = no_room or any(f"os error {number})" in str(error) for number in _NO_ROOM)
    if no_room:
        return f"no room: it needs about {needed:,} bytes, and {free:,} are free ({error})"
    kind = "" if isinstance(error, OSError | SafetensorError) else f"{type(error).__name__}: "
    return f"{kind}{error}"
