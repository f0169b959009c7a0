"""Checkpoints of a phase: copies taken at safe points while training goes on, and written by a thread."""

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from gspo.errors import RunError
from gspo.learner.shares import OwnShare
from gspo.learner.state import digest_of, random_state
from gspo.learner.trainer import Trainer
from gspo.loop import in_thread
from gspo.recipe.sections import CheckpointConfig
from gspo.run.checkpoint.store import RECIPE, STATE, DamagedError, Position, Store, move_into_place, seal, verified
from gspo.run.directory import RunDirectory
from gspo.run.plain_files import clear, sync
from gspo.run.progress import Best, Clock, Progress, encode


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The copy that the writing thread needs; nothing in it changes while the run goes on.

    Example: Snapshot(position=Position(12), share=OwnShare(weights=…, …), log_bytes={…}, …)
    """

    position: Position
    about: Mapping[str, Any]  # of the manifest
    share: OwnShare  # the weights, and what trains them
    tensors: Mapping[str, Tensor]  # random/…, records/…
    progress: str  # as JSON
    log_bytes: Mapping[str, int]  # how much of each log belongs to it

    @property
    def num_bytes(self) -> int:
        """About what the checkpoint takes on the disk."""
        tensors = (*self.share.weights.values(), *self.share.tensors.values(), *self.tensors.values())
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) + sum(self.log_bytes.values())


@dataclass(kw_only=True)
class Checkpointer:
    """Knows a phase's state at its last safe point, has it saved when that is due, and on the way out of an error.

    Example: `checkpointer.safe_point(progress)` after step 20 saves `step_000020` where `every` is 10.
    """

    store: Store
    settings: CheckpointConfig
    trainer: Trainer
    directory: RunDirectory
    clock: Clock
    about: Mapping[str, Any]  # goes into every manifest
    progress: Progress  # at the last safe point
    _written: Future[RunError | None] | None = None  # what is being written, and how it has failed, if it has

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()  # never the wall clock, which may be set back
        self.note(self.progress)

    @property
    def path(self) -> Path:
        """Return where the checkpoint of the last safe point lies, once it is made."""
        return self.store.path(self.progress.position)

    def note(self, progress: Progress) -> None:
        """The state is whole, and `progress` is its own: what is saved from now on is this."""
        self.progress, self._random, self._log_bytes = progress, random_state(), self.directory.log_bytes()
        self.trainer.note_whole()

    @property
    def _best(self) -> Best | None:
        """The best value by checkpoint.best, where it was the step that has just been finished."""
        best = self.progress.best
        return best if best is not None and self.progress.position == Position(best.step) else None

    def safe_point(self, progress: Progress, check_stop: Callable[[], None] = lambda: None) -> None:
        """Note the state, and save it where that is due; RunError where an earlier checkpoint could not be written.

        A stop comes first, for what ends a run by a signal saves the state all the same.
        """
        self.note(progress)
        check_stop()
        if self._written is not None and self._written.done():
            self.wait()
        if self._is_due(progress.position):
            self.save()

    def _is_due(self, position: Position) -> bool:
        every, seconds = self.settings.every, self.settings.seconds
        if every and position.stage == 0 and position.steps > 0 and position.steps % every == 0:
            return True
        # What best_model/ comes from is a whole checkpoint, so that a resume never starts from before that model.
        return self._best is not None or (seconds is not None and time.monotonic() - self._saved_at >= seconds)

    def save(self) -> None:
        """Have the state of the last safe point written: waits for the one before, and not for the writing.

        Raises RunError where the one before has failed. What lies there already, whole, is not written again.
        """
        self.directory.check_lock()
        with self.clock.stage("checkpoint"):
            self.wait()
            self._saved_at = time.monotonic()
            if not self.path.exists():
                self._written = in_thread("checkpoint writer", self._work, self._snapshot(), self._best)
            elif self._best:  # a process that was killed may not have come to this
                self.directory.save_best(self.path / "model", self._best)

    def wait(self) -> None:
        """Until nothing is being written, by any rank; RunError where that has failed."""
        if self._written is not None:
            failure = self._written.result()
            self._written = None
            if failure is not None:
                raise failure

    def _snapshot(self) -> Snapshot:
        """Copy what the run will change; only this costs its loop time."""
        progress = replace(self.progress, seconds=self.clock.elapsed, stage_seconds=dict(self.clock.seconds))
        text, records = encode(progress)
        tensors = {f"random/{name}": tensor for name, tensor in self._random.items()}
        tensors |= {f"records/{name}": tensor for name, tensor in records.items()}
        return Snapshot(
            position=self.progress.position,
            about=self.about,
            share=self.trainer.copy_shares(),
            tensors=tensors,
            progress=text,
            log_bytes=self._log_bytes,
        )

    def _work(self, snapshot: Snapshot, best: Best | None) -> RunError | None:
        """Write a snapshot, and do what comes after; how that has failed, if it has."""
        what = f"the checkpoint of {snapshot.position} could not be written"
        try:
            self._write(snapshot)
            what = f"the checkpoint of {snapshot.position} is whole, but what comes after it was not done"
            if best is not None:
                self.directory.save_best(self.store.path(snapshot.position) / "model", best)
            self.store.prune(self.settings.keep)
            return None
        except Exception as error:
            is_plain = isinstance(error, OSError | SafetensorError | RunError | DamagedError)
            reason = str(error) if is_plain else f"{type(error).__name__}: {error}"
            with suppress(Exception):
                snapshot.share.tell_others(None)  # where they have not been told yet
            return RunError(f"{what}: {reason}\n  where: {self._rest(snapshot)}")

    def _write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, have it on the disk, read it back, and only then let it count."""
        if not all(weight.isfinite().all() for weight in snapshot.share.weights.values() if weight.is_floating_point()):
            raise RunError("the weights are not finite: they are not saved over what is whole")
        home, unfinished = self.directory.path, self.store.unfinished(snapshot.position)
        clear(unfinished)
        self.store.root.mkdir(exist_ok=True)  # without its parents: where they have gone, it is no run's directory
        unfinished.mkdir()
        sync(home)
        self.trainer.policy.save(unfinished / "model", snapshot.share.weights)
        snapshot.share.write(unfinished, snapshot.tensors)
        (unfinished / STATE).write_text(snapshot.progress, encoding="utf-8")
        (unfinished / RECIPE).write_text(self.directory.recipe_text, encoding="utf-8")
        for name, size in snapshot.log_bytes.items():  # the logs have grown since
            (unfinished / name).write_bytes(log := (home / name).read_bytes()[:size])
            if len(log) < size:
                raise RunError(f"{home / name} has lost lines")
        seal(unfinished, {**snapshot.about, "weights_sha256": digest_of(snapshot.share.weights)})
        verified(unfinished)
        move_into_place(unfinished, self.store.path(snapshot.position))

    def _rest(self, snapshot: Snapshot) -> str:
        """Say where a write has failed, the room there, and what to resume from; remove what it has left."""
        root, rest = self.store.root, "there is no other"
        try:
            if others := [one for one in self.store.positions() if one != snapshot.position]:
                rest = f"the one before, {others[-1].name}, is untouched: fix this, then resume"
            clear(self.store.unfinished(snapshot.position))
            free = shutil.disk_usage(root.parent).free
        except OSError:  # the disk may be gone altogether
            return f"{root}; {rest}"
        return f"{root}; it needs about {snapshot.num_bytes:,} bytes, and {free:,} are free; {rest}"
