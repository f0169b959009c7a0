"""The loop: queries, rollout, reward, advantage, update, and back."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo.coldstart import cold_start
from gspo.config import Recipe
from gspo.inert import inert_settings
from gspo.interrupt import Interrupt
from gspo.objective import group_advantages
from gspo.policy.optimizer import Optimizer
from gspo.policy.update import old_logprobs, update
from gspo.prepare import prepare
from gspo.records import Batch, Group, Score
from gspo.report.display import Display
from gspo.report.run_directory import RunDirectory
from gspo.report.summary import introduction
from gspo.reward.score import score
from gspo.rollout.source import sample_groups
from gspo.run import Run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to."""

    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl; step 0 is the evaluation before training
    model: Path  # loads with AutoModelForCausalLM.from_pretrained
    diagnoses: dict[str, str]  # by name, in words
    interrupted: bool
    seconds: float


def train(
    recipe: Recipe,
    *,
    queries: Iterable[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    display: Display | None = None,
) -> Outcome:
    """Train as the recipe says; `queries` (rows) and `reward` (functions) given here stand in for the recipe's.

    Raises UserError for input that cannot be used; whatever ends the run, the model reached by then is saved.
    """
    started = time.monotonic()
    display = display or Display()
    recipe = _with_what_is_given(recipe, queries is not None, reward is not None, display)
    for sentence in inert_settings(recipe):
        display.note(f"note: {sentence}", style="yellow")
    parts = prepare(recipe, queries=queries, reward=reward)
    with Interrupt(display.alert) as interrupt:
        directory = RunDirectory.create(recipe)
        run = Run(recipe=recipe, parts=parts, directory=directory, display=display, interrupt=interrupt)
        display.note(introduction(recipe, parts.policy, parts.queries, parts.functions))
        try:
            _cold_start(run)
            run.record_start()
            _loop(run, _optimizer(run))
        except KeyboardInterrupt:
            interrupt.requested = True
        except Exception:
            display.stop()
            display.note(f"the run ends here; the model it reached is saved in {directory.model}")
            raise
        finally:
            display.stop()
            with interrupt.held():
                directory.save_model(parts.policy)
    return Outcome(
        metrics=run.lines,
        model=directory.model,
        diagnoses=run.diagnoses,
        interrupted=interrupt.requested,
        seconds=time.monotonic() - started,
    )


def _with_what_is_given(recipe: Recipe, queries: bool, reward: bool, display: Display) -> Recipe:
    """The recipe without the sources that Python stands in for, so that the run directory does not name them."""
    if queries and (recipe.queries.path or recipe.queries.procedural):
        display.note("note: queries come from Python: the recipe's own are set aside", style="yellow")
    if reward and recipe.reward:
        display.note("note: the reward comes from Python: the recipe's own is set aside", style="yellow")
    own = recipe.queries.model_copy(update={"path": None, "procedural": None}) if queries else recipe.queries
    return recipe.model_copy(update={"queries": own, "reward": () if reward else recipe.reward})


def _loop(run: Run, optimizer: Optimizer) -> None:
    recipe, policy, temperature = run.recipe, run.parts.policy, run.recipe.rollout.temperature
    run.display.start("GSPO", recipe.steps)
    for step in range(1, recipe.steps + 1):
        if run.interrupt.requested:
            return
        with run.clock("total"):
            with run.clock("rollout"):
                groups = sample_groups(
                    policy,
                    run.queries(step),
                    recipe.rollout,
                    group_size=recipe.rollout.group_size,
                    seed=run.sampling_seed(step),
                    policy_version=optimizer.steps_taken,
                )
            with run.clock("reward"):
                scored = score(groups, run.parts.functions)
            batch = make_batch(groups, scored.scores)
            with run.clock("likelihood"):
                old = old_logprobs(policy, batch, recipe.actor, temperature=temperature)
            with run.clock("update"):
                reports = update(policy, optimizer, batch, old, recipe.actor, temperature=temperature)
        run.record(step, batch, reports, scored=scored)


def make_batch(groups: Sequence[Group], scores: Sequence[Score]) -> Batch:
    """Groups with their scores and Eq. 7's advantages; an unscored rollout takes no part in its group."""
    # float64, so that nearly equal rewards keep their order.
    rewards = torch.tensor([float("nan") if s.reward is None else s.reward for s in scores], dtype=torch.float64)
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group.rollouts])
    advantages = group_advantages(rewards, ids).tolist()
    return Batch(groups=tuple(groups), scores=tuple(scores), advantages=tuple(advantages))


def _optimizer(run: Run) -> Optimizer:
    """Made after the cold start, whose weights its masters start from."""
    num_updates = run.recipe.steps * run.recipe.actor.mini_batches
    return Optimizer(run.parts.policy.model, run.recipe.actor.optimizer, total_steps=num_updates)


def _cold_start(run: Run) -> None:
    recipe = run.recipe
    if not recipe.cold_start.steps:
        return
    run.display.start("cold start", recipe.cold_start.steps)
    for done in cold_start(
        run.parts.policy, run.parts.demonstrations, recipe.cold_start, recipe.actor, seed=recipe.seed
    ):
        run.display.cold_step(done.step, done.loss)
        run.directory.append("cold_start.jsonl", vars(done))
        if run.interrupt.requested:
            break
    run.display.stop()
