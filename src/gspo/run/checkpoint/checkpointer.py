"""Checkpoints of a phase: copies taken at safe points while training goes on, and written by a thread."""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gspo.errors import RunError
from gspo.model.policy import Policy
from gspo.recipe.sections import CheckpointConfig
from gspo.run.checkpoint.state import TrainedParts, digest_of, random_state
from gspo.run.checkpoint.store import (
    RECIPE,
    STATE,
    TENSORS,
    DamagedError,
    Position,
    Store,
    move_into_place,
    seal,
    verified,
)
from gspo.run.clock import Clock
from gspo.run.directory import RunDirectory
from gspo.run.plain_files import clear, sync
from gspo.run.progress import Progress, encode

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the writing thread needs; nothing in it changes while the run goes on.

    Example: Snapshot(position=Position(12), tensors={"optimizer/steps_taken": tensor(48), …}, log_bytes={…}, …)
    """

    position: Position
    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]  # optimizer/…, critic/…, random/…, records/…
    progress: str  # as JSON
    rollouts: tuple[Path, ...]  # files that are not known to be on the disk yet
    log_bytes: Mapping[str, int]  # how much of each log belongs to it

    @property
    def num_bytes(self) -> int:
        """About what the checkpoint takes on the disk."""
        different = {tensor.data_ptr(): tensor.nbytes for tensor in (*self.weights.values(), *self.tensors.values())}
        return sum(different.values()) + sum(self.log_bytes.values())


@dataclass(kw_only=True)
class Checkpointer:
    """Knows a phase's state at its last safe point, has it saved when that is due, and on the way out of an error.

    Example: `checkpointer.safe_point(progress)` after step 20 saves `step_000020` where `every` is 10.
    """

    store: Store
    settings: CheckpointConfig
    policy: Policy
    trained_parts: TrainedParts  # empty once a phase has made its last step
    directory: RunDirectory
    clock: Clock
    about: Mapping[str, Any]  # goes into every manifest
    progress: Progress  # at the last safe point
    _thread: threading.Thread | None = None
    _failure: RunError | None = None
    _synced: frozenset[str] = frozenset()  # rollout files

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()  # never the wall clock, which may be set back
        self.note(self.progress)

    @property
    def path(self) -> Path:
        """Where the checkpoint of the last safe point lies, once it is made."""
        return self.store.path(self.progress.position)

    def note(self, progress: Progress) -> None:
        """The state is whole, and `progress` is its own: what is saved from now on is this."""
        self.progress, self._random, self._log_bytes = progress, random_state(), self.directory.log_bytes()
        self._steps_taken = self._count_steps()

    def safe_point(self, progress: Progress, check_stop: Callable[[], None] = lambda: None) -> None:
        """Note the state, and save it where that is due; RunError where an earlier checkpoint could not be written.

        A stop comes first, for what ends a run by a signal saves the state all the same.
        """
        self.note(progress)
        check_stop()
        self._raise_failure()
        position, every, seconds = progress.position, self.settings.every, self.settings.seconds
        is_due = every and position.stage == 0 and position.steps > 0 and position.steps % every == 0
        if is_due or (seconds is not None and time.monotonic() - self._saved_at >= seconds):
            self.save()

    def save(self) -> None:
        """Have the state of the last safe point written: waits for the one before, and not for the writing.

        Raises RunError where the one before has failed. What lies there already, whole, is not written again.
        """
        self.directory.check_lock()
        with self.clock.stage("checkpoint"):
            self.wait()
            self._saved_at = time.monotonic()
            if not self.path.exists():
                snapshot = self._snapshot()
                self._thread = threading.Thread(target=self._work, args=(snapshot,), daemon=True)
                self._thread.name = "checkpoint writer"
                self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written; RunError where that has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    @property
    def is_whole(self) -> bool:
        """Whether no optimiser step was made since the last safe point, and no reference refreshed."""
        return self._steps_taken == self._count_steps()

    def _count_steps(self) -> list[int | None]:
        return [getattr(part, "steps_taken", None) for part in self.trained_parts.values()]

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _snapshot(self) -> Snapshot:
        """Copy what the run will change; only this costs its loop time."""
        stage_seconds = dict(self.clock.seconds)
        text, records = encode(replace(self.progress, seconds=self.clock.elapsed, stage_seconds=stage_seconds))
        parts = {part: owner.state() for part, owner in self.trained_parts.items()}
        parts |= {"random": self._random, "records": records}
        tensors = {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
        names = frozenset(self.progress.rollout_files)
        new, self._synced = names - self._synced, names
        return Snapshot(
            position=self.progress.position,
            weights=self.policy.weights(),
            tensors={name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()},
            progress=text,
            rollouts=tuple(self.directory.rollouts / name for name in new),
            log_bytes=self._log_bytes,
        )

    def _work(self, snapshot: Snapshot) -> None:
        what = f"the checkpoint of {snapshot.position} could not be written"
        try:
            self._write(snapshot)
        except Exception as error:
            self._failure = RunError(f"{what}: {error}")
            with suppress(OSError):  # the disk may be gone altogether
                self._failure = RunError(f"{what}: {self._reason(error, snapshot)}")
            return
        try:
            self.store.prune(self.settings.keep)
        except Exception as error:
            what = f"the checkpoint of {snapshot.position} is whole, but an old one stays: {error}"
            self._failure = RunError(f"{what}\n  where: {self.store.root}; remove it, then resume")

    def _write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, have it on the disk, read it back, and only then let it count."""
        if not all(weight.isfinite().all() for weight in snapshot.weights.values() if weight.is_floating_point()):
            raise RunError("the weights are not finite: they are not saved over what is whole")
        home, unfinished = self.directory.path, self.store.unfinished(snapshot.position)
        clear(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for path in (*snapshot.rollouts, *{path.parent for path in snapshot.rollouts}, self.store.root.parent):
            with suppress(FileNotFoundError):  # somebody has tidied up
                sync(path)
        self.policy.save(unfinished / "model", snapshot.weights)
        save_file(dict(snapshot.tensors), unfinished / TENSORS)
        (unfinished / STATE).write_text(snapshot.progress, encoding="utf-8")
        (unfinished / RECIPE).write_text(self.directory.recipe_text, encoding="utf-8")
        for name, size in snapshot.log_bytes.items():  # the logs have grown since
            (unfinished / name).write_bytes((home / name).read_bytes()[:size])
        seal(unfinished, {**self.about, "weights_sha256": digest_of(snapshot.weights)})
        verified(unfinished)
        move_into_place(unfinished, self.store.path(snapshot.position))

    def _reason(self, error: Exception, snapshot: Snapshot) -> str:
        """Why a write has failed, where, and what there is to resume from; what it has left is removed."""
        free = shutil.disk_usage(self.store.root.parent).free
        clear(self.store.unfinished(snapshot.position), ignore_errors=True)
        others = [position for position in self.store.positions() if position != snapshot.position]
        rest = "there is no other"
        if others:
            rest = f"the one before, {others[-1].name}, is untouched: fix this, then resume"
        reason = str(error)
        # safetensors hands the system's message on, but no number.
        if getattr(error, "errno", None) in _NO_ROOM or any(f"os error {number})" in reason for number in _NO_ROOM):
            reason = f"no room: it needs about {snapshot.num_bytes:,} bytes, and {free:,} are free ({error})"
        elif not isinstance(error, OSError | SafetensorError | RunError | DamagedError):
            reason = f"{type(error).__name__}: {error}"
        return f"{reason}\n  where: {self.store.root}; {rest}"
