"""A run started or resumed: its parts, its directory, what its two phases share, and how it ends."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from signal import Signals
from typing import Any

from gspo import loop
from gspo.engine.engine import Engine
from gspo.engine.make import make_engine
from gspo.errors import DivergedError, RunError, Stopped, UserError, encodable
from gspo.interrupt import Interrupt
from gspo.learner.engine_of_ranks import EngineOfRanks
from gspo.learner.state import digest_of
from gspo.learner.trainer import Phase, Trainer
from gspo.recipe.schema import Recipe
from gspo.reward.functions import close_functions
from gspo.reward.reply import TrainerState
from gspo.rollout.sampler import Sampler
from gspo.rollout.source import Source
from gspo.run.checkpoint.checkpointer import Checkpointer
from gspo.run.checkpoint.store import RECIPE, Checkpoint, Store
from gspo.run.console import Display
from gspo.run.directory import RunDirectory
from gspo.run.place import check_place, how_to_resume, move_old_run
from gspo.run.prepare import FromPython, Inputs, longest_sequence, prepare
from gspo.run.progress import Clock, Progress
from gspo.run.resume import (
    base_digest,
    code_of,
    environment,
    reopen,
    restore_directory,
    restore_progress,
    rounding_changes,
    rows_digest,
    tokens_digest,
)


@dataclass(kw_only=True)
class Run:
    """The parts that the phases of a run share: the cold start, then reinforcement learning.

    Example: run.trainer.policy is trained; run.progress.steps == 12 and run.stopped_by is None during step 13.
    """

    recipe: Recipe
    trainer: Trainer
    parts: Inputs
    engine: Engine  # samples from the policy's weights
    sampler: Sampler  # asks it
    directory: RunDirectory
    display: Display
    interrupt: Interrupt
    clock: Clock
    about: Mapping[str, Any]  # what must be, or should be, the same when the run is resumed
    is_resumed: bool = False
    in_cold_start: bool
    progress: Progress = field(default_factory=Progress)  # of the phase under way, at its last safe point
    saved: Checkpoint | None = None  # the checkpoint of that phase that is yet to be put in place
    checkpointer: Checkpointer | None = None  # of the phase under way
    source: Source | None = None  # of the groups, once there was a first step
    _warned: set[str] = field(default_factory=set)

    def start_phase(self, phase: Phase) -> Progress:
        """Start a phase, or put everything back to where a checkpoint has it; the phase's progress."""
        self.in_cold_start, saved, self.saved = phase == "cold start", self.saved, None
        if saved is None:
            self.progress = Progress()
        is_unnamed = self.recipe.actor.kl.reference is None and not self.in_cold_start
        is_new = is_unnamed and self.progress.reference_sha256 is None
        self.trainer.begin(phase, None if saved is None else saved.path, copy_reference=is_new)
        self.clock.seconds = dict(self.progress.stage_seconds)
        root, settings = self.directory.checkpoints, self.recipe.checkpoint
        if self.in_cold_start:  # whose steps are short: `every` counts those of reinforcement learning
            root, settings = self.directory.cold_checkpoints, settings.model_copy(update={"every": 0})
        elif self.trainer.reference is not None and (saved is None or not self.recipe.actor.kl.refresh_steps):
            self.progress = replace(self.progress, reference_sha256=self._digest_of_reference())
        self.checkpointer = Checkpointer(
            store=Store(root),
            settings=settings,
            trainer=self.trainer,
            directory=self.directory,
            clock=self.clock,
            about=self.about,
            progress=self.progress,
        )
        return self.progress

    def _digest_of_reference(self) -> str:
        """Compute the digest of the reference's weights.

        They are the policy's as reinforcement learning starts, or those that the recipe names. UserError where a
        resumed run would go on with others than before. A refreshed reference is in the checkpoint, with its digests.
        """
        before, digest = self.progress.reference_sha256, digest_of(self.trainer.weights("reference"))
        if before not in (None, digest):
            start = str(self.directory.cold_start) if self.recipe.cold_start.steps else "model"
            fix = "restore it from a copy: every update so far was made against it"
            where = self.recipe.actor.kl.reference or start
            raise UserError("the reference model is not the one the run began with", where=where, fix=fix)
        return digest

    def safe_point(self, progress: Progress) -> Progress:
        """The state is whole: note the progress, and save both where that is due. RunError where a save has failed.

        A signal stops the run here, but for one after its last step, when only the final model is yet to be written.
        """
        assert self.checkpointer is not None
        # Something may have been sampled meanwhile.
        self.progress = progress if self.source is None else replace(progress, ahead=self.source.snapshot())
        self.checkpointer.safe_point(self.progress, self._check_stop)
        return progress

    def _check_stop(self) -> None:
        if not self._is_trained:
            self.trainer.check_stop()

    @property
    def _is_trained(self) -> bool:
        return not self.in_cold_start and self.progress.is_over(self.recipe.steps)

    def close_source(self) -> None:
        """Give up what is in flight; it is asked for again when the run goes on."""
        if self.source is not None:
            loop.start(self.source.close()).result()

    def trainer_state(self, steps: int) -> TrainerState:
        """Return what reward functions get of the run once so many steps are finished."""
        drawn = self.progress.batches_drawn * self.recipe.rollout.queries_per_step - len(self.progress.ahead)
        return TrainerState(global_step=steps, max_steps=self.recipe.steps, epoch=drawn / len(self.parts.queries.train))

    def warn_once(self, about: str, sentence: str) -> None:
        """Show a warning, but no second one about the same."""
        if about not in self._warned:
            self._warned.add(about)
            self.display.note(f"warning: {sentence}", style="yellow")

    @property
    def stopped_by(self) -> Signals | None:
        """The signal that ended the run before its last step."""
        return None if self._is_trained else self.interrupt.signal

    def finish_phase(self) -> Path:
        """Have the state of the last safe point on the disk, whether that was due or not; where it lies."""
        assert self.checkpointer is not None
        with self.display.waiting("writing the last checkpoint"):
            self.checkpointer.save()
            self.checkpointer.wait()
        return self.checkpointer.path

    def record_start(self, introduction: str) -> None:
        """Add a line to history.jsonl for a process that begins the run or resumes it."""
        self._record(
            event="resumed" if self.is_resumed else "begun",
            process=os.getpid(),
            host=socket.gethostname(),
            working_directory=self.about["working_directory"],
            introduction=introduction,
            environment=self.about["environment"],
        )

    @contextmanager
    def end_recorded(self) -> Iterator[None]:
        """Add a line for how the process leaves the run: finished, stopped, interrupted at once, or failed."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            how, reason = "finished", self.progress.reason_for_end(self.recipe.steps)
            if isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped):
                how = "interrupted"
            elif error is not None and not isinstance(error, Stopped):
                how, reason = "failed", encodable(str(error)) or type(error).__name__
            elif self.stopped_by is not None:
                how, reason = "stopped", Signals(self.stopped_by).name
            with suppress(RunError, UserError):  # the disk may be what it has ended of
                self._record(event="ended", how=how, reason=reason)

    def _record(self, **line: Any) -> None:
        steps, num_cold = self.progress.steps, self.recipe.cold_start.steps
        cold, done = (steps, 0) if self.in_cold_start else (num_cold, steps)
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **line, "seconds": self.clock.elapsed}
        self.directory.append("history.jsonl", {**line, "cold_start_step": cold, "step": done})

    @contextmanager
    def saved_on_the_way_out(self) -> Iterator[None]:
        """Save the state of the last safe point where a signal or an error ends the block; say how the run goes on."""
        note = self.display.note
        try:
            yield
        except BaseException as error:
            try:
                if not isinstance(error, Exception | Stopped):
                    note("ended at once: what has been done since the last checkpoint is not saved")
                elif self.trainer.is_busy:
                    note("what has been done since the last checkpoint is lost: ranks that are gone had a part of it")
                else:
                    self._save_for(error)
            finally:
                self.display.stop()
                if (self.directory.path / RECIPE).is_file():  # else the error says what has become of it
                    note(f"to go on: {how_to_resume(self.recipe, has_on_step='on_step' in self.parts.hooks)}")
            raise

    def _save_for(self, error: BaseException) -> None:
        note, checkpointer, source = self.display.note, self.checkpointer, self.source
        if checkpointer is None:  # between the phases, or before the first
            return
        try:
            checkpointer.wait()
        except RunError as failure:  # of an earlier one: this one may well be written
            note(str(failure))
        if source is not None and self.recipe.rollout.max_staleness and self.progress.batch is None:
            # A step may be being collected: what it has so far is sampled, too.
            ahead = (*source.handed_over, *source.snapshot())
            checkpointer.progress = replace(
                self.progress, ahead=ahead, batches_drawn=source.batches_drawn, num_taken=dict(source.num_taken)
            )
        if isinstance(error, DivergedError):
            return
        if not self.trainer.is_whole:
            note("the error came between an optimiser step and its record: this state is not saved")
            return
        try:
            note(f"saved: {self.finish_phase()}")
        except RunError as failure:
            if isinstance(error, Stopped):
                raise
            if str(failure) != str(error):
                note(str(failure))  # the one under way is what is to be heard of first


@contextmanager
def open_run(
    recipe: Recipe, trainer: Trainer, given: FromPython, *, display: Display, resume: bool, overwrite: bool = False
) -> Iterator[Run]:
    """The run, ready for its next step; its directory and its reward functions' processes are let go of in the end."""
    with ExitStack() as stack:
        with display.waiting("reading the newest checkpoint"):
            reopened, saved = reopen(recipe, display.note) if resume else (None, None)
        if reopened is None:
            check_place(recipe, overwrite=overwrite)  # before anything takes time
        else:
            stack.enter_context(closing(reopened))
        output = stack.enter_context(display.output_of_processes())
        interrupt = Interrupt(display.alert, ending="ending: no step is under way, so nothing is lost")
        with interrupt, display.waiting("loading the recipe's parts") as say:
            parts = prepare(recipe, trainer, given, saved=saved, say=say, output=output)
        stack.callback(close_functions, [f for eval_set in parts.evaluation_sets for f in eval_set.functions])
        stack.callback(close_functions, parts.functions)
        if parts.tools is not None:
            stack.callback(parts.tools.close)
        # Now that all is loaded, and before an engine writes there.
        if overwrite:
            move_old_run(recipe, display.note)
        with interrupt, display.waiting("starting the engine") as say:
            longest = longest_sequence(recipe.at_longest, parts.queries, parts.evaluation_sets)
            engine = stack.enter_context(closing(_engine(recipe, trainer, longest, say)))
        directory = reopened or stack.enter_context(closing(RunDirectory.create(recipe)))
        stack.callback(display.stop)
        interrupt.ending = "ending, and saving what is done"
        stack.enter_context(interrupt)  # the last, so that a signal ends a close that is slow
        run = Run(
            recipe=recipe,
            trainer=trainer,
            parts=parts,
            engine=engine,
            sampler=Sampler(engine, trainer.policy, parts.tools),
            directory=directory,
            display=display,
            interrupt=interrupt,
            clock=Clock(display.stage),
            about=_about(trainer, parts, engine),
            in_cold_start=recipe.cold_start.steps > 0,
        )
        trainer.stage = run.clock.stage
        stack.callback(run.close_source)
        if reopened is not None:
            _restore(run, saved)
        yield run


def _engine(recipe: Recipe, trainer: Trainer, longest_sequence: int, say: Callable[[str], object]) -> Engine:
    if trainer.num_ranks > 1 and recipe.rollout.is_in_trainer:
        return EngineOfRanks(trainer)
    policy = trainer.policy
    if policy.is_sharded:  # the engine gathers it layer by layer
        policy = replace(policy, call_others=trainer.call_others)
    return make_engine(recipe, policy, directory=recipe.run_dir, longest_sequence=longest_sequence, say=say)


def _about(trainer: Trainer, parts: Inputs, engine: Engine) -> Mapping[str, Any]:
    """Return what must be, or should be, the same when the run is resumed."""
    own = environment(trainer, parts.functions, engine.describe(), parts.hooks, parts.tools)
    if parts.refresh is not None and parts.refresh.call is not None:
        own[f"code of {parts.refresh.name}"] = code_of(parts.refresh.call)
    return {
        "environment": own,
        "rows_sha256": rows_digest(parts.rows, parts.pairs, parts.set_rows),
        "tokens_sha256": tokens_digest(parts.queries),
        "base_sha256": base_digest(trainer.recipe),
        "num_streamed": parts.rows.num_streamed,
        "working_directory": str(Path.cwd()),
    }


def _restore(run: Run, saved: Checkpoint | None) -> None:
    """Put everything but the optimiser, which is not made yet, back to where the checkpoint has it."""
    note, directory, recipe = run.display.note, run.directory, run.recipe
    with run.display.waiting("restoring the checkpoint"):
        progress = None
        if saved is not None:
            progress = restore_progress(saved, recipe, run.trainer.weights(), run.parts.queries)
        restore_directory(directory, recipe, saved, note)
    if saved is None or progress is None:
        return
    run.is_resumed = True
    run.clock.resume(progress.seconds)
    run.in_cold_start = saved.path.parent == directory.cold_checkpoints
    if saved.path != directory.cold_start:  # where that is whole, the next phase starts from its weights
        run.saved, run.progress = saved, progress
    _note_resumption(run, saved, progress)


def _note_resumption(run: Run, saved: Checkpoint, progress: Progress) -> None:
    """Say from where the run goes on, and what is not as it was."""
    note, recipe = run.display.note, run.recipe
    inexact = rounding_changes(saved, recipe, run.about["environment"])
    for change in inexact:
        is_missed = change.key == "code of hook on_step" and change.now is None
        missed = "; it is not called: from Python, give on_step= again" if is_missed else ""
        note(f"NOT an exact resume: {change}{missed}")
    phase = " of the cold start" if saved.is_cold_start else ""
    note(f"{'goes on' if inexact else 'resumed'} from {saved.path}: {progress.position}{phase}")
    if run.progress.is_over(recipe.steps) and not run.in_cold_start:
        why = progress.reason_for_end(recipe.steps)
        done = f"all {recipe.steps} steps are done" if why is None else f"ended after step {progress.steps}: {why}"
        note(f"{done}; more are made with {'' if why is None else 'another '}steps=…")
