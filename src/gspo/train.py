"""The loop: queries, rollout, reward, advantage, update, and back."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gspo.errors import Stopped, UserError
from gspo.evaluation.sets import GivenRows
from gspo.learner.advantages import with_advantages
from gspo.learner.clip_range import with_clip_range
from gspo.learner.critic import Critic
from gspo.learner.forward_passes import compute_old_logprobs, score_with_reference_and_critic
from gspo.learner.micro_batching import Learner
from gspo.learner.optimizer import Optimizer
from gspo.learner.reference import RefreshedReference
from gspo.learner.sft import cold_start
from gspo.learner.update import update
from gspo.rank_environment import is_of_others
from gspo.ranks import from_first, joined, losses_named, meet, on_all
from gspo.recipe.callables import refuse_import
from gspo.recipe.files import check_files
from gspo.recipe.load import as_recipe
from gspo.recipe.schema import Recipe
from gspo.run.checkpoint.state import TrainedParts
from gspo.run.collect import collect
from gspo.run.console import Display
from gspo.run.history import end_recorded, record_start
from gspo.run.hooks import Hook
from gspo.run.place import renamed
from gspo.run.prepare import FromPython, Functions, Rows
from gspo.run.recorder import Recorder
from gspo.run.run import Run, open_run
from gspo.run.summary import introduction, summary
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
    with ExitStack() as stack:
        stack.enter_context(joined(recipe.trainer.timeout_seconds, recipe.model.device))
        from_first(partial(check_trackers, recipe.report.trackers, where="report.trackers"))
        if new:
            recipe = from_first(partial(renamed, recipe, display.note))
        run = stack.enter_context(open_run(recipe, given, display=display, resume=resume, overwrite=overwrite))
        about = introduction(recipe, run.parts)
        record_start(run, about)
        names = () if is_of_others() else recipe.report.trackers
        trackers = tracked(run.directory.path, names, display.note, run.interrupt)
        with trackers as announce, end_recorded(run), losses_named():
            display.note(about)
            decoding = run.engine.describe().get("decoding")
            notes = [f"the model is decoded {decoding}"] if decoding else []
            for sentence in (*run.parts.notes, *notes):
                display.note(f"note: {sentence}", style="yellow")
            recorder = Recorder(run)
            meet()  # rank 0 may have loaded trackers: the next wait may be for a collective, whose time is limited
            model = _phases(run, recorder, announce)
            lines = from_first(lambda: recorder.lines)
        return Outcome(
            metrics=lines,
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
                run.directory.save_model(run.parts.policy)
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
    if queries and (recipe.queries.path or recipe.queries.procedural):
        display.note("note: queries come from Python: the recipe's own are set aside", style="yellow")
    if reward and recipe.reward:
        what = "the recipe's is set aside, with its weights and limits: gspo.Reward(function, weight=…) gives others"
        display.note(f"note: the reward comes from Python: {what}", style="yellow")
    kept_queries = recipe.queries.model_copy(update={"path": None, "procedural": None}) if queries else recipe.queries
    recipe = recipe.model_copy(update={"queries": kept_queries, "reward": () if reward else recipe.reward})
    if isinstance(source, str | Path):
        check_files(recipe, source)
    return recipe


def _train(run: Run, recorder: Recorder, announce: Callable[[int], None]) -> None:
    recipe, clock, check_stop = run.recipe, run.clock, run.interrupt.check_stop_of_all
    policy, reference = run.parts.policy, run.parts.reference
    optimizer, critic, refreshed = on_all(partial(_trained_parts, run))
    parts = {"optimizer": optimizer, "critic": critic, "reference": refreshed}
    phase = run.start_phase({name: part for name, part in parts.items() if part is not None})
    progress = run.safe_point(recorder.start(phase))
    run.display.start(recipe.actor.title, recipe.steps, done=progress.steps)
    learner = Learner(
        policy=policy,
        optimizer=optimizer,
        actor=recipe.actor,
        temperature=recipe.rollout.temperature,  # a hook may change it
        max_tokens=recipe.rollout.max_new_tokens,
        critic=critic,
        check_stop=check_stop,
    )
    while not progress.is_over(recipe.steps):
        with clock.stage("total"):
            actor, sampling = with_clip_range(recipe.actor, progress.clip_scale), progress.sampling(recipe.rollout)
            learner = replace(learner, actor=actor, temperature=sampling.temperature)
            optimizer.factor = progress.learning_rate_factor
            if (batch := progress.batch) is None:
                progress = run.safe_point(collect(run, progress, policy_version=optimizer.steps_taken))
                batch = progress.batch
                assert batch is not None
            if not progress.reports:
                with clock.stage("appraisal"):
                    batch = score_with_reference_and_critic(batch, learner, reference)
                with clock.stage("advantage"):
                    batch = with_advantages(batch, learner.actor, sampling=recipe.rollout, critic=recipe.critic)
                with clock.stage("likelihood"):
                    batch = compute_old_logprobs(batch, learner)
            updates = update(learner, batch, num_done=len(progress.reports))
            for report, batch in clock.each("update", updates):
                progress = run.safe_point(replace(progress, batch=batch, reports=(*progress.reports, report)))
        progress = recorder.step(progress)
        if refreshed is not None:
            refreshed.step(progress.steps)
        progress = run.safe_point(progress)
        announce(progress.steps)


def _trained_parts(run: Run) -> tuple[Optimizer, Critic | None, RefreshedReference | None]:
    """What reinforcement learning changes, beside the policy itself."""
    recipe, policy, reference = run.recipe, run.parts.policy, run.parts.reference
    num_updates = recipe.steps * recipe.actor.updates_per_step
    optimizer, critic, refreshed = Optimizer(policy.model, recipe.actor.optimizer, total_steps=num_updates), None, None
    if recipe.actor.advantage == "gae":
        critic = Critic(recipe.critic, policy, run.parts.value_trunk, total_steps=num_updates)
    if reference is not None and recipe.actor.kl.refresh_steps:
        refreshed = RefreshedReference(recipe.actor.kl, reference, policy)
    return optimizer, critic, refreshed


def _cold_start(run: Run, recorder: Recorder) -> None:
    """Supervised learning: a phase that leaves a model, from which reinforcement learning starts."""
    if not run.in_cold_start:
        return
    policy, settings, check_stop = run.parts.policy, run.recipe.cold_start, run.interrupt.check_stop_of_all
    options: dict[str, Any] = {"total_steps": settings.steps, "where": "cold_start.optimizer"}
    optimizer = on_all(partial(Optimizer, policy.model, settings.optimizer, **options))
    is_done = run.progress.steps == settings.steps  # only its last checkpoint is yet to be made its result
    trained_parts: TrainedParts = {} if is_done else {"optimizer": optimizer}
    progress = run.start_phase(trained_parts, cold_start=True)
    run.display.start("cold start", settings.steps, done=progress.steps)
    examples, num_done = run.parts.demonstrations, progress.steps
    for step in cold_start(policy, optimizer, examples, run.recipe, num_done=num_done, check_stop=check_stop):
        progress = recorder.cold_step(step, progress)
        if progress.steps < settings.steps:
            run.safe_point(progress)
    optimizer.close()
    trained_parts.clear()  # the next phase has its own
    run.safe_point(progress)
    run.directory.finish_cold_start(run.finish_phase())
    run.checkpointer = None
    run.display.stop()
