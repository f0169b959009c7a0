"""The loop: queries, rollout, reward, advantage, update, and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gspo.errors import DivergedError
from gspo.learner.advantages import with_advantages
from gspo.learner.auxiliary_scores import score_with_reference_and_critic
from gspo.learner.clip_range import with_clip_range
from gspo.learner.old_policy import compute_old_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.learner.sft import cold_start
from gspo.learner.update import Learner, update
from gspo.recipe.rules import ineffective_settings
from gspo.recipe.schema import OptimizerConfig, Recipe
from gspo.run.begin import begun, end_recorded
from gspo.run.collect import collect
from gspo.run.companions import begin_companions
from gspo.run.console import Display
from gspo.run.interrupt import Stopped
from gspo.run.record import record_cold_step, record_start, record_step
from gspo.run.run import Run
from gspo.run.summary import introduction
from gspo.trackers.followers import following
from gspo.trackers.tracker import check_trackers


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to."""

    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl; step 0 is the evaluation before training
    model: Path  # loads with AutoModelForCausalLM.from_pretrained
    diagnoses: Mapping[str, str]  # by name, in words
    signal: int | None  # that ended the run before its last step; it can be resumed
    seconds: float  # in all, those before a resume too


def train(
    recipe: Recipe,
    *,
    queries: Iterable[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    display: Display | None = None,
    resume: bool = False,
) -> Outcome:
    """Train as the recipe says; `queries` (rows) and `reward` (functions) given here stand in for the recipe's.

    With `resume`, the run in the recipe's directory goes on as if it had never ended. Raises UserError for input that
    cannot be used, RunError where a run cannot go on. A first signal, and an error that leaves the state whole, leave a
    checkpoint of the instant.
    """
    display = display or Display()
    recipe = _with_what_is_given(recipe, queries is not None, reward is not None, display)
    for sentence in ineffective_settings(recipe):
        display.note(f"note: {sentence}", style="yellow")
    check_trackers(recipe.report.trackers, where="report.trackers")
    with (
        begun(recipe, queries=queries, reward=reward, display=display, resume=resume) as run,
        following(run.directory.path, recipe.report.trackers, display.note),
        end_recorded(run),
    ):
        display.note(introduction(recipe, run.parts.policy, run.parts.queries, run.parts.functions))
        for sentence in run.parts.notes:
            display.note(f"note: {sentence}", style="yellow")
        try:
            _cold_start(run)
            record_start(run)
            _loop(run)
            model = run.finish()
        except Stopped:
            model = run.save_and_wait() / "model"
        except DivergedError:
            run.settle()
            raise
        except Exception:
            run.save_if_whole()
            raise
        except KeyboardInterrupt:
            display.note("ended at once: what has been done since the last checkpoint is not saved")
            run.note_resume()
            raise
        return Outcome(
            metrics=run.lines,
            model=model,
            diagnoses=run.progress.diagnoses,
            signal=run.stopped_by,
            seconds=run.elapsed,
        )


def _with_what_is_given(recipe: Recipe, queries: bool, reward: bool, display: Display) -> Recipe:
    """The recipe without the sources that Python stands in for, so that the run directory does not name them."""
    if queries and (recipe.queries.path or recipe.queries.procedural):
        display.note("note: queries come from Python: the recipe's own are set aside", style="yellow")
    if reward and recipe.reward:
        display.note("note: the reward comes from Python: the recipe's own is set aside", style="yellow")
    own = recipe.queries.model_copy(update={"path": None, "procedural": None}) if queries else recipe.queries
    return recipe.model_copy(update={"queries": own, "reward": () if reward else recipe.reward})


def _loop(run: Run) -> None:
    recipe, policy, reference, temperature = run.recipe, run.parts.policy, run.parts.reference, run.temperature
    optimizer = _optimizer(run, recipe.actor.optimizer, recipe.steps * recipe.actor.mini_batches)
    begin_companions(run)
    run.display.start(recipe.actor.title, recipe.steps, done=run.progress.steps)
    for step in range(run.progress.steps + 1, recipe.steps + 1):
        with run.clock("total"):
            actor = with_clip_range(recipe.actor, run.progress.clip_scale)
            batch = collect(run, step, policy_version=optimizer.steps_taken)
            score = partial(score_with_reference_and_critic, policy=policy, reference=reference, critic=run.critic)
            batch = run.stage("appraisal", partial(score, batch, actor, temperature=temperature))
            with run.clock("advantage"):
                batch = with_advantages(batch, actor, sampling=recipe.rollout, critic=recipe.critic)
            old_logprobs = partial(compute_old_logprobs, policy, batch, actor, temperature=temperature)
            batch = run.stage("likelihood", old_logprobs)
            learner = Learner(
                policy=policy,
                optimizer=optimizer,
                actor=actor,
                temperature=temperature,
                max_tokens=recipe.rollout.max_new_tokens,
                critic=run.critic,
            )
            num_done = len(run.progress.in_hand.reports)
            batch, reports = run.updates(update(learner, batch, num_done=num_done, may_stop=run.interrupt.may_stop))
        record_step(run, step, batch, reports)


def _optimizer(run: Run, settings: OptimizerConfig, num_updates: int) -> Optimizer:
    """A phase's own, begun with it or taken up; its masters start from the weights as they are now."""
    run.optimizer = Optimizer(run.parts.policy.model, settings, total_steps=num_updates)
    if run.optimizer_state:
        run.optimizer.restore(run.optimizer_state)
        run.optimizer_state = {}
    run.steps_taken = run.optimizer.steps_taken
    return run.optimizer


def _cold_start(run: Run) -> None:
    recipe, progress = run.recipe, run.progress
    if not progress.in_cold_start:
        return
    optimizer = _optimizer(run, recipe.cold_start.optimizer, recipe.cold_start.steps)
    run.display.start("cold start", recipe.cold_start.steps, done=progress.cold_steps)
    for done in cold_start(
        run.parts.policy,
        optimizer,
        run.parts.demonstrations,
        recipe.cold_start,
        recipe.actor,
        seed=recipe.seed,
        num_done=progress.cold_steps,
        may_stop=run.interrupt.may_stop,
    ):
        record_cold_step(run, done)
        if progress.in_cold_start:
            run.reached()
    optimizer.close()
    run.optimizer = None  # the next phase has its own
    run.display.stop()
    run.reached()
