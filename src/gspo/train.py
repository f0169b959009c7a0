"""The loop: queries, rollout, reward, advantage, update, and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.learner.advantages import with_advantages
from gspo.learner.clip_range import with_clip_range
from gspo.learner.critic import Critic
from gspo.learner.forward_passes import compute_old_logprobs, score_with_reference_and_critic
from gspo.learner.micro_batching import Learner
from gspo.learner.optimizer import Optimizer
from gspo.learner.reference import RefreshedReference
from gspo.learner.sft import cold_start
from gspo.learner.update import update
from gspo.recipe.callables import refuse_import
from gspo.recipe.schema import Recipe
from gspo.run.checkpoint.state import TrainedParts
from gspo.run.collect import collect
from gspo.run.console import Display
from gspo.run.history import end_recorded, record_start
from gspo.run.interrupt import Stopped
from gspo.run.prepare import Functions, Rows
from gspo.run.recorder import Recorder
from gspo.run.run import Run, open_run
from gspo.run.summary import introduction
from gspo.trackers.send import tracked
from gspo.trackers.tracker import check_trackers


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Example: after four steps, outcome.metrics[4]["reward/mean"] == 0.7 and outcome.model == Path("runs/a/model")
    """

    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl; step 0 is the evaluation before training
    model: Path  # loads with AutoModelForCausalLM.from_pretrained
    diagnoses: Mapping[str, str]  # sentences, by name
    signal: int | None  # the signal that ended the run early, if one did; the run can be resumed
    seconds: float  # wall time, including the time before a resume


def train(
    recipe: Recipe,
    *,
    queries: Rows | None = None,
    reward: Functions | None = None,
    display: Display | None = None,
    resume: bool = False,
) -> Outcome:
    """Train as the recipe says; `queries` (rows) and `reward` (functions) given here replace those of the recipe.

    With `resume`, the run in the recipe's directory goes on as if it had never ended. Raises UserError for input that
    cannot be used, and RunError if the run cannot go on. When a first signal ends the run, or an error that leaves its
    state whole, a checkpoint of the last safe point is saved.
    """
    refuse_import()
    if not isinstance(recipe, Recipe):
        fix = 'gspo.train(gspo.load_recipe("my_run.yaml"), …) or gspo.train(gspo.make_recipe({"name": …}), …)'
        raise UserError(f"a recipe is needed, not {type(recipe).__name__}", where="gspo.train", fix=fix)
    display = display or Display()
    recipe = _without_what_is_given(recipe, queries is not None, reward is not None, display)
    check_trackers(recipe.report.trackers, where="report.trackers")
    with open_run(recipe, queries=queries, reward=reward, display=display, resume=resume) as run:
        about = introduction(recipe, run.parts.policy, run.parts.queries, run.parts.functions)
        record_start(run, about)
        trackers = tracked(run.directory.path, recipe.report.trackers, display.note, run.interrupt)
        with trackers as announce, end_recorded(run):
            display.note(about)
            for sentence in run.parts.notes:
                display.note(f"note: {sentence}", style="yellow")
            recorder = Recorder(run)
            try:
                with run.saved_on_the_way_out():
                    _cold_start(run, recorder)
                    _train(run, recorder, announce)
                    run.finish_phase()
                    with display.waiting("saving the model"):
                        run.directory.save_model(run.parts.policy)
                    model = run.directory.model
            except Stopped:
                assert run.checkpointer is not None
                model = run.checkpointer.path / "model"
        return Outcome(
            metrics=recorder.lines,
            model=model,
            diagnoses=run.progress.diagnoses,
            signal=run.stopped_by,
            seconds=run.clock.elapsed,
        )


def _without_what_is_given(recipe: Recipe, queries: bool, reward: bool, display: Display) -> Recipe:
    """The recipe without the sources that Python stands in for, so that the run directory does not name them."""
    if queries and (recipe.queries.path or recipe.queries.procedural):
        display.note("note: queries come from Python: the recipe's own are set aside", style="yellow")
    if reward and recipe.reward:
        display.note("note: the reward comes from Python: the recipe's own is set aside", style="yellow")
    own = recipe.queries.model_copy(update={"path": None, "procedural": None}) if queries else recipe.queries
    return recipe.model_copy(update={"queries": own, "reward": () if reward else recipe.reward})


def _train(run: Run, recorder: Recorder, announce: Callable[[int], None]) -> None:
    recipe, clock, check_stop = run.recipe, run.clock, run.interrupt.check_stop
    policy, reference = run.parts.policy, run.parts.reference
    num_updates = recipe.steps * recipe.actor.updates_per_step
    optimizer, critic = Optimizer(policy.model, recipe.actor.optimizer, total_steps=num_updates), None
    trained_parts: TrainedParts = {"optimizer": optimizer}
    if recipe.actor.advantage == "gae":
        critic = Critic(recipe.critic, policy, run.parts.value_trunk, total_steps=num_updates)
        trained_parts["critic"] = critic
    refreshed = None
    if reference is not None and recipe.actor.kl.refresh_steps:
        refreshed = trained_parts["reference"] = RefreshedReference(recipe.actor.kl, reference, policy)
    progress = run.start_phase(trained_parts)
    recorder.start()
    progress = run.safe_point(progress)
    run.display.start(recipe.actor.title, recipe.steps, done=progress.steps)
    learner = Learner(
        policy=policy,
        optimizer=optimizer,
        actor=recipe.actor,
        temperature=recipe.rollout.temperature,
        max_tokens=recipe.rollout.max_new_tokens,
        critic=critic,
        check_stop=check_stop,
    )
    while progress.steps < recipe.steps:
        with clock.stage("total"):
            learner = replace(learner, actor=with_clip_range(recipe.actor, progress.clip_scale))
            if (batch := progress.batch) is None:
                batch, num_rounds = collect(run, progress, policy_version=optimizer.steps_taken)
                extra_rounds = progress.extra_rounds + num_rounds - 1
                progress = run.safe_point(replace(progress, batch=batch, extra_rounds=extra_rounds))
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


def _cold_start(run: Run, recorder: Recorder) -> None:
    """Supervised learning: a phase that leaves a model, from which reinforcement learning starts."""
    if not run.in_cold_start:
        return
    policy, settings, check_stop = run.parts.policy, run.recipe.cold_start, run.interrupt.check_stop
    where = "cold_start.optimizer"
    optimizer = Optimizer(policy.model, settings.optimizer, total_steps=settings.steps, where=where)
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
