"""The loop: queries, rollout, reward, advantage, update, and back."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo.errors import Stopped, UserError
from gspo.evaluation.sets import GivenRows
from gspo.interrupt import Interrupt
from gspo.learner.clip_range import with_clip_range
from gspo.learner.ranks import joined, losses_named
from gspo.learner.served_teacher import with_served_teacher
from gspo.learner.sft import rows_of_steps
from gspo.learner.trainer import StepSettings, Trainer, trainer_of_rank_0
from gspo.rank_environment import is_of_others
from gspo.recipe.callables import refuse_import
from gspo.recipe.files import check_files
from gspo.recipe.load import as_recipe
from gspo.recipe.schema import Recipe
from gspo.run.collect import collect
from gspo.run.console import Display
from gspo.run.hooks import Hook
from gspo.run.place import renamed
from gspo.run.prepare import FromPython, Functions, Rows
from gspo.run.progress import Progress
from gspo.run.recorder import Recorder
from gspo.run.refresh import refreshed
from gspo.run.run import Run, open_run
from gspo.run.summary import changes_of, introduction, summary
from gspo.trackers.send import tracked
from gspo.trackers.tracker import check_trackers


@dataclass(frozen=True, kw_only=True, repr=False)
class Outcome:
    """The result of a run.

    Example: after four steps, outcome.metrics[4]["reward/mean"] == 0.7 and outcome.model == Path("runs/a/model")
    """

    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl; step 0 is the evaluation before training
    model: Path  # loads with AutoModelForCausalLM.from_pretrained
    diagnoses: Mapping[str, str]  # sentences, by name
    signal: int | None  # the signal that ended the run early, if one did; the run can be resumed
    reason: str | None = None  # why a hook or early_stop ended the run early, if one did
    seconds: float  # wall time, including the time before a resume

    def __repr__(self) -> str:
        """The table at a run's end; all numbers of all steps would fill pages of a notebook."""
        return summary(self.metrics, self.diagnoses, self.model, self.seconds, signal=self.signal, reason=self.reason)


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    queries: Rows | None = None,
    reward: Functions | None = None,
    on_step: Hook | None = None,
    evaluation: GivenRows | None = None,
    display: Display | None = None,
    resume: bool = False,
    overwrite: bool = False,
    new: bool = False,
) -> Outcome:
    """Train as a recipe says, also as a mapping or a file; `queries` (rows) and `reward` (functions) replace its own.

    `evaluation` has further rows to evaluate on, by the name of their set; the reward functions judge them.
    `on_step(step, metrics, samples)` is called after each step, after the recipe's hooks (docs/guides/hooks.md).
    With `resume`, the run in the recipe's directory goes on as if it had never ended. With `overwrite`, a run that has
    ended there is renamed to `name.old-1` once everything is loaded. With `new`, the run takes the next free name:
    `name-2`, …

    Raises UserError for input that cannot be used, and RunError if the run cannot go on. When a first signal ends the
    run, or an error that leaves its state whole, a checkpoint of the last safe point is saved.
    """
    refuse_import()
    if resume + overwrite + new > 1:
        raise UserError("give one of resume, overwrite and new", where="gspo.train", fix="leave out the others")
    display = display or Display()
    if is_of_others():
        display = Display(quiet=True)
    recipe = _as_given(recipe, queries is not None, reward is not None, display)
    given = FromPython(queries=queries, reward=reward, on_step=on_step, evaluation=evaluation)
    with joined(recipe.trainer.timeout_seconds, recipe.model.device):
        if is_of_others():
            with Interrupt(lambda _: None):
                served: Outcome = Trainer().serve()
                return served
        with trainer_of_rank_0() as trainer:
            check_trackers(recipe.report.trackers, where="report.trackers")
            recipe = renamed(recipe, display.note) if new else recipe
            outcome = _run(recipe, trainer, given, display=display, resume=resume, overwrite=overwrite)
            trainer.end(outcome)
            return outcome


def _run(recipe: Recipe, trainer: Trainer, given: FromPython, *, display: Display, **how: bool) -> Outcome:
    with ExitStack() as stack:
        run = stack.enter_context(open_run(recipe, trainer, given, display=display, **how))
        about = introduction(recipe, trainer.policy, run.parts)
        run.record_start(about)
        trackers = tracked(run.directory.path, recipe.report.trackers, display.note, run.interrupt)
        with trackers as announce, run.end_recorded(), losses_named():
            display.note(about)
            decoding = run.engine.describe().get("decoding")
            notes = [f"the model is decoded {decoding}"] if decoding else []
            for sentence in (*run.parts.notes, *notes):
                display.note(f"note: {sentence}", style="yellow")
            recorder = Recorder(run)
            model = _phases(run, recorder, announce)
        return Outcome(
            metrics=recorder.lines,
            model=model,
            diagnoses=run.progress.diagnoses,
            signal=run.stopped_by,
            reason=run.progress.reason_for_end(recipe.steps),
            seconds=run.clock.elapsed,
        )


def _phases(run: Run, recorder: Recorder, announce: Callable[[int], None]) -> Path:
    """Cold start, reinforcement learning, final model; where that is, or the last checkpoint's after a signal."""
    try:
        with run.saved_on_the_way_out():
            _cold_start(run, recorder)
            _train(run, recorder, announce)
            run.finish_phase()
            with run.display.waiting("saving the model"):
                policy = run.trainer.policy
                run.directory.save_model(policy, run.trainer.weights() if policy.is_sharded else None)
            if (best := run.progress.best) is not None:
                kept = f"{run.directory.best_model}, after step {best.step}"
                run.display.note(f"best model: {kept}, with {best.metric} {best.value:g}")
            return run.directory.model
    except Stopped as stop:
        run.interrupt.signal = stop.args[0]  # which may have come to another rank
        assert run.checkpointer is not None
        return run.checkpointer.path / "model"


def _as_given(source: Recipe | Mapping[str, Any] | str | Path, queries: bool, reward: bool, display: Display) -> Recipe:
    """The recipe without the sources that Python stands in for, so that the run directory does not name them.

    UserError for a file that it still names and that is not there.
    """
    recipe = as_recipe(source, where="gspo.train")
    if queries and recipe.queries.has_data:
        display.note("note: queries come from Python: the recipe's own are set aside", style="yellow")
    if reward and recipe.reward:
        what = "the recipe's is set aside, with its weights and limits: gspo.Reward(function, weight=…) gives others"
        display.note(f"note: the reward comes from Python: {what}", style="yellow")
    named = {
        "reward.sources": not reward and any(own.sources for own in recipe.reward),
        "phases.queries.weights": any(phase.queries.weights for phase in recipe.phases),
    }
    if queries and any(named.values()):
        what = "queries come from Python, and this tells sources of the recipe's own apart"
        where = ", ".join(key for key, is_given in named.items() if is_given)
        raise UserError(what, where=where, fix="leave it out")
    if reward and any(phase.reward_weights for phase in recipe.phases):
        what = "the reward comes from Python, and these weights are of the recipe's own functions"
        raise UserError(what, where="phases.reward_weights", fix="leave them out, or name the functions in the recipe")
    without: dict[str, Any] = {"path": None, "procedural": None, "sources": {}, "weights": {}}
    kept_queries = recipe.queries.model_copy(update=without) if queries else recipe.queries
    recipe = recipe.model_copy(update={"queries": kept_queries, "reward": () if reward else recipe.reward})
    if isinstance(source, str | Path):
        check_files(recipe, source)
    return recipe


def _train(run: Run, recorder: Recorder, announce: Callable[[int], None]) -> None:
    recipe, clock, trainer = run.recipe, run.clock, run.trainer
    progress = run.safe_point(recorder.start(run.start_phase("training")))
    run.display.start(recipe.actor.title, recipe.steps, done=progress.steps)
    num_begun = recorder.lines[-1].get("phase", 0) if recorder.lines else 0  # that has been said
    while not progress.is_over(recipe.steps):
        now = recipe.at(step := progress.steps + 1, progress.phases_begun)
        begun_before, num_begun = num_begun, recipe.num_begun(step, progress.phases_begun)
        for phase in recipe.phases[begun_before:num_begun]:
            run.display.note(f"from step {step}: {changes_of(phase)}")
        with clock.stage("total"):
            if progress.batch is None:
                if (refresh := run.parts.refresh) is not None:
                    progress = run.safe_point(refreshed(run, refresh, progress))
                progress = run.safe_point(collect(run, now, progress))
            if not progress.reports:
                assert progress.batch is not None
                batch, settings = progress.batch, _settings(run, now, progress)
                if recipe.teacher.url is not None:
                    with clock.stage("appraisal"):
                        temperature = settings.rollout.temperature
                        batch = with_served_teacher(batch, recipe.teacher, temperature=temperature)
                batch, reports = trainer.step(batch, settings)
                progress = run.safe_point(replace(progress, batch=batch, reports=reports))
        progress = run.safe_point(recorder.step(now, progress))
        announce(progress.steps)


def _settings(run: Run, now: Recipe, progress: Progress) -> StepSettings:
    rate = now.actor.optimizer.lr / run.recipe.actor.optimizer.lr
    return StepSettings(
        number=progress.steps + 1,
        rollout=progress.sampling(now.rollout),
        actor=with_clip_range(now.actor, progress.clip_scale),
        learning_rate_factor=rate * progress.learning_rate_factor,
    )


def _cold_start(run: Run, recorder: Recorder) -> None:
    """Supervised learning: a phase that leaves a model, from which reinforcement learning starts."""
    if not run.in_cold_start:
        return
    settings, progress = run.recipe.cold_start, run.start_phase("cold start")
    run.display.start("cold start", settings.steps, done=progress.steps)
    for rows in rows_of_steps(run.parts.demonstrations, run.recipe)[progress.steps :]:
        progress = recorder.cold_step(*run.trainer.fit(rows), progress)
        if progress.steps < settings.steps:
            run.safe_point(progress)
    run.trainer.end_cold_start()
    run.safe_point(progress)
    run.directory.finish_cold_start(run.finish_phase())
    run.checkpointer = None
    run.display.stop()
