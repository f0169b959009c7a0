"""A run started or resumed: its parts, its directory, what its two phases share, and how it ends."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

from gspo import loop
from gspo.engine.engine import Engine
from gspo.engine.make import make_engine
from gspo.errors import DivergedError, RunError, Stopped, UserError
from gspo.learner.engine_of_ranks import EngineOfRanks
from gspo.model.policy import Policy
from gspo.ranks import from_first, is_of_all, num_ranks, rank
from gspo.recipe.schema import Recipe
from gspo.reward.functions import close_functions
from gspo.reward.log import TrainerState
from gspo.rollout.sampler import Sampler
from gspo.rollout.source import Source
from gspo.run.checkpoint.changes import environment
from gspo.run.checkpoint.checkpointer import Checkpointer
from gspo.run.checkpoint.state import TrainedParts, digest_of, restore_random_state, seed_everything, tensors_of
from gspo.run.checkpoint.store import RECIPE, Checkpoint, Store
from gspo.run.clock import Clock
from gspo.run.console import Display
from gspo.run.directory import RunDirectory
from gspo.run.interrupt import Interrupt
from gspo.run.place import check_place, how_to_resume, move_old_run, put_back
from gspo.run.prepare import FromPython, Prepared, longest_sequence, prepare
from gspo.run.progress import Progress
from gspo.run.resume import (
    inexactness,
    reopen,
    restore_directory,
    restore_progress,
    rows_digest,
    tokens_digest,
)

T = TypeVar("T")
_NOT_WHOLE = "the error came between an optimiser step and its record: this state is not saved"


@dataclass(kw_only=True)
class Run:
    """What the phases of a run share: the cold start, then reinforcement learning.

    Example: run.parts.policy is trained; run.progress.steps == 12 and run.stopped_by is None in the midst of step 13.
    """

    recipe: Recipe
    parts: Prepared
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
    source: Source | None = None  # of the groups, once there was a first step; rank 0 has it
    _warned: set[str] = field(default_factory=set)

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
        elif self.parts.reference is not None and (saved is None or "reference" not in trained_parts):
            digest = self._digest_of_reference(self.parts.reference)
            self.progress = replace(self.progress, reference_sha256=digest)
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

    def on_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, where one is enough: what it collects and writes. The others help its engine to sample."""
        engine = self.engine
        if not isinstance(engine, EngineOfRanks):
            return make()

        def make_and_wait() -> T:
            try:
                return make()
            finally:
                engine.wait()

        try:
            return from_first(make_and_wait, engine.help_with)
        finally:
            engine.release()

    def _digest_of_reference(self, reference: Policy) -> str:
        """Of its weights, which are the policy's as reinforcement learning starts, or those that the recipe names.

        UserError where a resumed run would go on with another reference than it has had. One that is refreshed comes
        from the checkpoint, which has digests of its own.
        """
        named, before = self.recipe.actor.kl.reference, self.progress.reference_sha256
        if named is None and before is None:
            reference.model.load_state_dict(self.parts.policy.model.state_dict())
        weights = reference.weights()

        def checked() -> str:
            if before not in (None, digest := digest_of(weights)):
                path = named or (str(self.directory.cold_start) if self.recipe.cold_start.steps else "model")
                fix = "restore it from a copy: every update so far was made against it"
                raise UserError("the reference model is not the one the run began with", where=path, fix=fix)
            return digest

        return from_first(checked)

    def safe_point(self, progress: Progress) -> Progress:
        """The state is whole: note the progress, and save both where that is due. RunError where a save has failed.

        A signal stops the run here, but for one after its last step, when only the final model is yet to be written.
        """
        assert self.checkpointer is not None
        # Something may have been sampled meanwhile; ranks that are told of the progress need none of it.
        self.progress = progress if self.source is None else replace(progress, ahead=self.source.snapshot())
        self.checkpointer.safe_point(self.progress, self._check_stop)
        return progress

    def _check_stop(self) -> None:
        if self.in_cold_start or not self.progress.is_over(self.recipe.steps):
            self.interrupt.check_stop_of_all()

    def close_source(self) -> None:
        """Give up what is in flight; it is asked for again when the run goes on."""
        if self.source is not None:
            loop.run(self.source.close())

    def trainer_state(self, steps: int) -> TrainerState:
        """What reward functions get of the run once so many steps are finished."""
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
        is_done = not self.in_cold_start and self.progress.is_over(self.recipe.steps)
        return None if is_done else self.interrupt.signal

    def finish_phase(self) -> Path:
        """Have the state of the last safe point on the disk, whether that was due or not; where it lies."""
        assert self.checkpointer is not None
        with self.display.waiting("writing the last checkpoint"):
            self.checkpointer.save()
            self.checkpointer.wait()
        return self.checkpointer.path

    @contextmanager
    def saved_on_the_way_out(self) -> Iterator[None]:
        """Save the state of the last safe point where a signal or an error ends the block; say how the run goes on."""
        try:
            yield
        except BaseException as error:
            try:
                if not is_of_all(error):
                    self.display.note(
                        "what has been done since the last checkpoint is lost: the ranks that are gone had a part of it"
                    )
                elif isinstance(error, Exception | Stopped):
                    self._save_for(error)
                else:
                    self.display.note("ended at once: what has been done since the last checkpoint is not saved")
            finally:
                self.display.stop()
                has_on_step = "on_step" in self.parts.hooks
                if (self.directory.path / RECIPE).is_file():  # else the error says what has become of it
                    self.display.note(f"to go on: {how_to_resume(self.recipe, has_on_step=has_on_step)}")
            raise

    def _save_for(self, error: BaseException) -> None:
        note, checkpointer = self.display.note, self.checkpointer
        if checkpointer is None:  # between the phases, or before the first
            return
        try:
            checkpointer.wait()
        except RunError as failure:  # of an earlier one: this one may well be written
            note(str(failure))
        if self.source is not None and self.recipe.rollout.max_staleness and self.progress.batch is None:
            # A step may be being collected: what it has so far is sampled, too.
            ahead = (*self.source.handed_over, *self.source.snapshot())
            checkpointer.progress = replace(self.progress, ahead=ahead, batches_drawn=self.source.batches_drawn)
        try:
            if from_first(lambda: not isinstance(error, DivergedError)):
                note(f"saved: {self.finish_phase()}" if checkpointer.is_whole else _NOT_WHOLE)
        except RunError as failure:
            if isinstance(error, Stopped):
                raise
            if str(failure) != str(error):
                note(str(failure))  # the one under way is what is to be heard of first


@contextmanager
def open_run(
    recipe: Recipe, given: FromPython, *, display: Display, resume: bool, overwrite: bool = False
) -> Iterator[Run]:
    """The run, ready for its next step; its directory and its reward functions' processes are let go of in the end."""
    with ExitStack() as stack:
        with display.waiting("reading the newest checkpoint"):
            reopened, saved = _reopened(recipe, display, resume=resume, overwrite=overwrite)
        if reopened is not None:
            stack.enter_context(closing(reopened))
        output = stack.enter_context(display.output_of_processes())
        alert = display.alert if rank() == 0 else lambda _: None
        interrupt = Interrupt(alert, ending="ending: no step is under way, so nothing is lost")
        with interrupt, display.waiting("loading the recipe's parts") as say:
            stop = interrupt.check_stop
            stops: dict[str, Any] = {"check_stop": stop, "check_stop_of_all": interrupt.check_stop_of_all}
            parts = prepare(recipe, given, **stops, saved=saved, say=say, output=output)
        stack.callback(close_functions, [f for eval_set in parts.evaluation_sets for f in eval_set.functions])
        stack.callback(close_functions, parts.functions)
        if overwrite:  # now that all is loaded, and before an engine writes there
            old = from_first(partial(move_old_run, recipe, display.note))
            if old is not None and rank() == 0:
                stack.callback(put_back, recipe, old, display.note)
        with interrupt, display.waiting("starting the engine") as say:
            options: dict[str, Any] = {"directory": recipe.run_dir, "check_stop": stop, "say": say}
            longest = longest_sequence(recipe, parts.queries, parts.evaluation_sets)

            def make(policy: Policy) -> Engine:
                return make_engine(recipe, policy, longest_sequence=longest, **options)

            engine = _of_ranks(recipe, parts.policy, make, stop) if num_ranks() > 1 else make(parts.policy)
        stack.enter_context(closing(engine))
        directory = reopened or stack.enter_context(closing(_created(recipe)))
        directory.note = display.note
        stack.callback(display.stop)
        interrupt.ending = "ending, and saving what is done"
        stack.enter_context(interrupt)  # the last, so that a signal ends a close that is slow
        run = Run(
            recipe=recipe,
            parts=parts,
            engine=engine,
            sampler=Sampler(engine, parts.policy),
            directory=directory,
            display=display,
            interrupt=interrupt,
            clock=Clock(display.stage),
            about=from_first(partial(_about, parts, engine)),  # of data of any size
            in_cold_start=recipe.cold_start.steps > 0,
        )
        stack.callback(run.close_source)
        if reopened is not None:
            _restore(run, saved)
        yield run


def _about(parts: Prepared, engine: Engine) -> Mapping[str, Any]:
    """What must be, or should be, the same when the run is resumed."""
    return {
        "environment": environment(parts.policy, parts.functions, engine.describe(), parts.hooks),
        "rows_sha256": rows_digest(parts.rows, parts.pairs, parts.set_rows),
        "tokens_sha256": tokens_digest(parts.queries),
        "num_streamed": parts.rows.num_streamed,
        "working_directory": str(Path.cwd()),
    }


def _reopened(
    recipe: Recipe, display: Display, *, resume: bool, overwrite: bool
) -> tuple[RunDirectory | None, Checkpoint | None]:
    """The directory and the checkpoint that a run goes on from; rank 0 looks, and locks the directory."""
    directory: RunDirectory | None = None

    def look() -> tuple[bool, Checkpoint | None]:
        nonlocal directory
        directory, saved = reopen(recipe, display.note) if resume else (None, None)
        if directory is None:
            check_place(recipe, overwrite=overwrite)  # before anything takes time
        return directory is not None, saved

    is_there, saved = from_first(look)
    return directory or (RunDirectory(recipe.run_dir) if is_there else None), saved


def _created(recipe: Recipe) -> RunDirectory:
    created: list[RunDirectory] = []
    from_first(lambda: created.append(RunDirectory.create(recipe)))
    return created[0] if created else RunDirectory(recipe.run_dir)


def _of_ranks(
    recipe: Recipe, policy: Policy, make: Callable[[Policy], Engine], check_stop: Callable[[], None]
) -> EngineOfRanks:
    return EngineOfRanks(policy, make, is_embedded=recipe.rollout.is_in_trainer, check_stop=check_stop)


def _restore(run: Run, saved: Checkpoint | None) -> None:
    """Put everything but the optimiser, which is not made yet, back to where the checkpoint has it."""
    note, directory, recipe = run.display.note, run.directory, run.recipe
    with run.display.waiting("restoring the checkpoint"):
        weights = {} if saved is None else run.parts.policy.weights()

        def restored() -> Progress | None:
            progress = None if saved is None else restore_progress(saved, recipe, weights, run.parts.queries)
            restore_directory(directory, recipe, saved, note)
            return progress

        progress = from_first(restored)
    if saved is None or progress is None:
        return
    run.is_resumed = True
    run.clock.resume(progress.seconds)
    run.in_cold_start = saved.path.parent == directory.cold_checkpoints
    if saved.path != directory.cold_start:  # where that is whole, the next phase starts from its weights
        run.saved, run.progress = saved, progress
    from_first(partial(_note_resumption, run, saved, progress))


def _note_resumption(run: Run, saved: Checkpoint, progress: Progress) -> None:
    """Say from where the run goes on, and what is not as it was."""
    note, recipe = run.display.note, run.recipe
    inexact = inexactness(saved, recipe, run.about["environment"])
    for line in inexact:
        is_missed = line.startswith("code of hook on_step was ") and line.endswith(" is None")
        missed = "; it is not called: from Python, give on_step= again" if is_missed else ""
        note(f"NOT an exact resume: {line}{missed}")
    phase = " of the cold start" if saved.is_cold_start else ""
    note(f"{'goes on' if inexact else 'resumed'} from {saved.path}: {progress.position}{phase}")
    if run.progress.is_over(recipe.steps) and not run.in_cold_start:
        why = progress.reason_for_end(recipe.steps)
        done = f"all {recipe.steps} steps are done" if why is None else f"ended after step {progress.steps}: {why}"
        note(f"{done}; more are made with {'' if why is None else 'another '}steps=…")
