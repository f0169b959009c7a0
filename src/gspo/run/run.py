"""A run started or resumed: its parts, its directory, what its two phases share, and how it ends."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import DivergedError, RunError
from gspo.recipe.schema import Recipe
from gspo.reward.functions import close_functions
from gspo.run.checkpoint.changes import environment
from gspo.run.checkpoint.checkpointer import Checkpointer
from gspo.run.checkpoint.state import TrainedParts, restore_random_state, seed_everything, tensors_of
from gspo.run.checkpoint.store import Checkpoint, Store
from gspo.run.clock import Clock
from gspo.run.console import Display
from gspo.run.directory import RunDirectory, check_absent, how_to_resume
from gspo.run.interrupt import Interrupt, Stopped
from gspo.run.prepare import Prepared, prepare
from gspo.run.progress import Progress
from gspo.run.resume import inexactness, reopen, restore_directory, restore_progress, tokens_digest


@dataclass(kw_only=True)
class Run:
    """What the phases of a run share: the cold start, then reinforcement learning."""

    recipe: Recipe
    parts: Prepared
    directory: RunDirectory
    display: Display
    interrupt: Interrupt
    clock: Clock
    about: Mapping[str, Any]  # what must be, or should be, the same when the run is resumed
    is_resumed: bool = False
    in_cold_start: bool
    progress: Progress  # of the phase under way, at its last safe point
    saved: Checkpoint | None = None  # the checkpoint of that phase that is yet to be put in place
    checkpointer: Checkpointer | None = None  # of the phase under way

    def start_phase(self, trained_parts: TrainedParts, *, cold_start: bool = False) -> Progress:
        """Start a phase, or put everything back to where a checkpoint has it; the phase's progress."""
        self.in_cold_start, saved, self.saved = cold_start, self.saved, None
        if saved is None:
            self.progress = Progress()
            seed_everything(self.recipe.seed)  # of its own, for the phase before may have been another process's
        else:
            for part, owner in trained_parts.items():
                owner.restore(tensors_of(saved.path, part))
            restore_random_state(tensors_of(saved.path, "random"))
        self.clock.seconds = dict(self.progress.stage_seconds)
        root, settings = self.directory.checkpoints, self.recipe.checkpoint
        if cold_start:  # whose steps are short: `every` counts those of reinforcement learning
            root, settings = self.directory.cold_checkpoints, settings.model_copy(update={"every": 0})
        self.checkpointer = Checkpointer(
            store=Store(root),
            settings=settings,
            policy=self.parts.policy,
            trained_parts=trained_parts,
            directory=self.directory,
            clock=self.clock,
            about=self.about,
            progress=self.progress,
        )
        return self.progress

    def safe_point(self, progress: Progress) -> Progress:
        """The state is whole: note the progress, and save both where that is due. RunError where a save has failed.

        A signal stops the run here, but for one after its last step, when only the final model is yet to be written.
        """
        assert self.checkpointer is not None
        self.progress = progress
        self.checkpointer.safe_point(progress, self._check_stop)
        return progress

    def _check_stop(self) -> None:
        if self.stopped_by is not None:
            raise Stopped

    @property
    def stopped_by(self) -> int | None:
        """The signal that ended the run before its last step."""
        signal, is_done = self.interrupt.signal, not self.in_cold_start and self.progress.steps >= self.recipe.steps
        return None if signal is None or is_done else int(signal)

    def finish_phase(self) -> Path:
        """Have the state of the last safe point on the disk, whether that was due or not; where it lies."""
        assert self.checkpointer is not None
        self.checkpointer.save()
        self.checkpointer.wait()
        return self.checkpointer.path

    @contextmanager
    def saved_on_the_way_out(self) -> Iterator[None]:
        """Save the state of the last safe point where a signal or an error ends the block; say how the run goes on."""
        try:
            yield
        except (Exception, Stopped) as error:
            self._save_for(error)
            raise
        except KeyboardInterrupt:
            self._say_how_to_resume("ended at once: what has been done since the last checkpoint is not saved")
            raise

    def _save_for(self, error: BaseException) -> None:
        note, checkpointer = self.display.note, self.checkpointer
        if checkpointer is None:  # between the phases, or before the first
            return self._say_how_to_resume()
        try:
            checkpointer.wait()
        except RunError as failure:  # of an earlier one: this one may well be written
            note(str(failure))
        try:
            if isinstance(error, DivergedError):
                return None
            if not checkpointer.is_whole:
                return note("the error came between an optimiser step and its record: this state is not saved")
            note(f"saved: {self.finish_phase()}")
        except RunError as failure:
            if isinstance(error, Stopped):
                raise
            note(str(failure))  # the one under way is what is to be heard of first
        finally:
            self._say_how_to_resume()

    def _say_how_to_resume(self, *sentences: str) -> None:
        self.display.stop()
        for sentence in (*sentences, f"to go on: {how_to_resume(self.recipe)}"):
            self.display.note(sentence)


@contextmanager
def open_run(
    recipe: Recipe,
    *,
    queries: Iterable[Mapping[str, Any]] | None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
    display: Display,
    resume: bool,
) -> Iterator[Run]:
    """The run, ready for its next step; its directory and its reward functions' processes are let go of in the end."""
    directory, saved = reopen(recipe, display.note) if resume else (None, None)
    is_resumed = directory is not None
    if directory is None:
        check_absent(recipe)  # before anything takes time
    parts: Prepared | None = None
    try:
        parts = prepare(recipe, queries=queries, reward=reward, saved=saved)
        with Interrupt(display.alert) as interrupt:
            directory = directory or RunDirectory.create(recipe)
            run = Run(
                recipe=recipe,
                parts=parts,
                directory=directory,
                display=display,
                interrupt=interrupt,
                clock=Clock(),
                about={
                    "environment": environment(parts.policy, parts.functions, parts.engine.describe()),
                    "rows_sha256": parts.rows_sha256,
                    "tokens_sha256": tokens_digest(parts.queries),
                    "working_directory": str(Path.cwd()),
                },
                in_cold_start=recipe.cold_start.steps > 0,
                progress=Progress(),
            )
            if is_resumed:
                _restore(run, saved)
            yield run
    finally:
        display.stop()
        if parts is not None:
            close_functions(parts.functions)
            parts.engine.close()
        if directory is not None:
            directory.close()


def _restore(run: Run, saved: Checkpoint | None) -> None:
    """Put everything but the optimiser, which is not made yet, back to where the checkpoint has it."""
    note, directory, recipe = run.display.note, run.directory, run.recipe
    progress = None if saved is None else restore_progress(saved, recipe, run.parts.policy, run.parts.queries)
    restore_directory(directory, recipe, saved, note)
    if saved is None or progress is None:
        return
    run.is_resumed = True
    run.clock.resume(progress.seconds)
    run.in_cold_start = saved.path.parent == directory.cold_checkpoints
    if saved.path != directory.cold_start:  # where that is whole, the next phase starts from its weights
        run.saved, run.progress = saved, progress
    for name in directory.damaged_rollouts(progress.rollout_files):
        note(f"rollouts/{name} is missing, or not as it was written; training does not need it")
    inexact = inexactness(saved, recipe, run.about["environment"])
    for line in inexact:
        note(f"NOT an exact resume: {line}. The numbers may differ from here on, in their last bits at first")
    phase = " of the cold start" if saved.is_cold_start else ""
    note(f"{'goes on' if inexact else 'resumed'} from {saved.path}: {progress.position}{phase}")
    if run.progress.steps == recipe.steps and not run.in_cold_start:
        note(f"all {recipe.steps} steps are done; more are made with steps=…")
