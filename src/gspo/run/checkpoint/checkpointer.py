"""Checkpoints of a phase: copies taken at safe points while training goes on, and written by a thread."""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gspo.errors import RunError
from gspo.model.parameters import saved_part
from gspo.model.policy import Policy
from gspo.ranks import from_first, gathered, leave_note, meet, rank, wait_for_note
from gspo.recipe.sections import CheckpointConfig
from gspo.run.best import Best
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
    tensors_file,
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
    other_ranks: Sequence[int] = ()  # that write tensors of their own

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
    _number: int = 0  # of the checkpoints written by this process
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

    @property
    def _best(self) -> Best | None:
        """By checkpoint.best, where it was the step that has just been finished."""
        best = self.progress.best
        return best if best is not None and self.progress.position == Position(best.step) else None

    def safe_point(self, progress: Progress, check_stop: Callable[[], None] = lambda: None) -> None:
        """Note the state, and save it where that is due; RunError where an earlier checkpoint could not be written.

        A stop comes first, for what ends a run by a signal saves the state all the same. Every rank has to call it.
        """
        self.note(progress)
        check_stop()
        self._raise_failure()
        if gathered(self._is_due(progress.position))[0]:
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
            if not from_first(self.path.exists):
                snapshot, self._number = self._snapshot(), self._number + 1
                work, arguments = (
                    (self._work, (snapshot, self._best)) if rank() == 0 else (self._work_beside, (snapshot,))
                )
                self._thread = threading.Thread(target=work, args=arguments, daemon=True)
                self._thread.name = "checkpoint writer"
                self._thread.start()
            elif self._best and rank() == 0:  # a process that was killed may not have come to this
                self.directory.save_best(self.path / "model", self._best)

    def wait(self) -> None:
        """Until nothing is being written, by any rank; RunError where that has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        meet()
        self._raise_failure()

    @property
    def is_whole(self) -> bool:
        """Whether no optimiser step was made since the last safe point, and no reference refreshed."""
        return self._steps_taken == self._count_steps()

    def _count_steps(self) -> list[int | None]:
        return [getattr(part, "steps_taken", None) for part in self.trained_parts.values()]

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None

        def raise_first() -> None:
            if failure is not None:
                raise failure

        from_first(raise_first)

    def _snapshot(self) -> Snapshot:
        """Copy what the run will change; only this costs its loop time."""
        stage_seconds, text = dict(self.clock.seconds), ""
        parts = {part: owner.state() for part, owner in self.trained_parts.items()}
        if rank() == 0:
            text, records = encode(replace(self.progress, seconds=self.clock.elapsed, stage_seconds=stage_seconds))
            parts |= {"random": self._random, "records": records}
        tensors = {
            f"{part}/{name}": saved_part(tensor) for part, state in parts.items() for name, tensor in state.items()
        }
        saved = {
            name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items() if tensor is not None
        }
        names = frozenset(self.progress.rollout_files)
        new, self._synced = names - self._synced, names
        return Snapshot(
            position=self.progress.position,
            weights=self.policy.weights(),
            tensors=saved,
            progress=text,
            rollouts=tuple(self.directory.rollouts / name for name in new),
            log_bytes=self._log_bytes,
            other_ranks=[number for number in gathered(rank() if saved else 0) if number],
        )

    def _work(self, snapshot: Snapshot, best: Best | None = None) -> None:
        what = f"the checkpoint of {snapshot.position} could not be written"
        try:
            self._write(snapshot)
        except Exception as error:
            self._failure = RunError(f"{what}: {error}")
            if snapshot.other_ranks:
                leave_note(f"{self._key}/directory", "")
            with suppress(OSError):  # the disk may be gone altogether
                self._failure = RunError(f"{what}: {self._reason(error, snapshot)}")
            return
        try:
            if best is not None:
                self.directory.save_best(self.store.path(snapshot.position) / "model", best)
            self.store.prune(self.settings.keep)
        except RunError as error:
            self._failure = error
        except Exception as error:
            what = f"the checkpoint of {snapshot.position} is whole, but an old one stays: {error}"
            self._failure = RunError(f"{what}\n  where: {self.store.root}; remove it, then resume")

    def _work_beside(self, snapshot: Snapshot) -> None:
        """What another rank than 0 writes: its own tensors, once rank 0 has made the directory."""
        with suppress(RunError, RuntimeError):  # rank 0 is gone: the main thread will come upon that
            if snapshot.tensors and wait_for_note(f"{self._key}/directory", by=0):
                path, problem = self.store.unfinished(snapshot.position) / tensors_file(rank()), ""
                try:
                    save_file(dict(snapshot.tensors), path)
                except Exception as error:
                    problem = f"{path.name}, of rank {rank()}: {error}"
                leave_note(f"{self._key}/{rank()}", problem)

    @property
    def _key(self) -> str:
        """What ranks tell each other of the checkpoint under way begins so."""
        return f"{self.store.root.name}/{self._number}"

    def _write_tensors(self, snapshot: Snapshot, directory: Path) -> None:
        """Those of rank 0, while the others write theirs; RunError where one of these could not."""
        save_file(dict(snapshot.tensors), directory / TENSORS)
        for other in snapshot.other_ranks:
            if problem := wait_for_note(f"{self._key}/{other}", by=other):
                raise RunError(problem)

    def _write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, have it on the disk, read it back, and only then let it count."""
        if not all(weight.isfinite().all() for weight in snapshot.weights.values() if weight.is_floating_point()):
            raise RunError("the weights are not finite: they are not saved over what is whole")
        home, unfinished = self.directory.path, self.store.unfinished(snapshot.position)
        clear(unfinished, ignore_errors=True)
        self.store.root.mkdir(exist_ok=True)  # without its parents: where they have gone, it is no run's directory
        unfinished.mkdir()
        if snapshot.other_ranks:
            leave_note(f"{self._key}/directory", "made")
        for path in (*snapshot.rollouts, *{path.parent for path in snapshot.rollouts}, self.store.root.parent):
            with suppress(FileNotFoundError):  # somebody has tidied up
                sync(path)
        self.policy.save(unfinished / "model", snapshot.weights)
        self._write_tensors(snapshot, unfinished)
        (unfinished / STATE).write_text(snapshot.progress, encoding="utf-8")
        (unfinished / RECIPE).write_text(self.directory.recipe_text, encoding="utf-8")
        for name, size in snapshot.log_bytes.items():  # the logs have grown since
            (unfinished / name).write_bytes(log := (home / name).read_bytes()[:size])
            if len(log) < size:
                raise RunError(f"{home / name} has lost lines")
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
