"""A step's groups with their scores, sampled in one round, or in several where dynamic sampling asks for signal."""

from collections.abc import Sequence
from functools import partial

from gspo.learner.advantages import rewards_differ
from gspo.recipe.schema import RolloutConfig
from gspo.reward.overlong import with_overlong_penalty
from gspo.reward.score import score
from gspo.rollout.random_numbers import SamplingKey
from gspo.run.run import Run
from gspo.types import Batch, Group, Query


def collect(run: Run, step: int, *, policy_version: int) -> Batch:
    """The step's groups; each round goes through the stages rollout and reward, so that a resumed run takes it up."""
    recipe, hand = run.recipe, run.progress.in_hand
    while True:
        sample = partial(_sample, run, step, hand.rounds, policy_version)
        groups = run.stage("rollout", sample)
        rounds = (*hand.rounds, run.stage("reward", partial(_scored, run, groups)))
        last = not recipe.rollout.dynamic_sampling or len(rounds) == recipe.rollout.max_rounds
        if last or _missing(rounds, recipe.rollout) <= 0:
            return choose_groups(rounds, recipe.rollout)
        hand.rounds, hand.rollout, hand.reward = rounds, None, None


def choose_groups(rounds: Sequence[Batch], sampling: RolloutConfig) -> Batch:
    """The first groups whose rewards differ and, where they are too few, the first of the others, in their order."""
    groups, size = _groups(rounds), sampling.queries_per_step
    order = sorted(range(len(groups)), key=lambda number: not rewards_differ(groups[number], sampling))  # stable
    names = rounds[0].reward_seconds
    return Batch(
        groups=tuple(groups[number] for number in sorted(order[:size])),
        dropped=tuple(groups[number] for number in sorted(order[size:])),
        reward_seconds={name: sum(scored.reward_seconds[name] for scored in rounds) for name in names},
    )


def _sample(run: Run, step: int, rounds: Sequence[Batch], policy_version: int) -> tuple[Group, ...]:
    """A round's groups; no query comes twice in a step, so that no two rounds draw the same random numbers."""
    engine, recipe = run.parts.engine, run.recipe
    engine.publish(run.parts.policy, policy_version)
    return engine.sample(
        _queries(run, step, rounds),
        recipe.rollout,
        SamplingKey(seed=recipe.seed, step=step),
        record_experts=recipe.actor.wants_engine_experts,
        check_stop=run.interrupt.check,
    )


def _scored(run: Run, groups: Sequence[Group]) -> Batch:
    return with_overlong_penalty(score(groups, run.parts.functions), run.recipe.rollout)


def _queries(run: Run, step: int, rounds: Sequence[Batch]) -> list[Query]:
    """Of the first round a batch of the order; of a later one as many as are missing, from the next batch."""
    if not rounds:
        return run.queries(step)
    missing = _missing(rounds, run.recipe.rollout)
    seen = {group.query.id for group in _groups(rounds)}  # where an epoch ends, the next batch may have them again
    return [query for query in run.queries(step, len(rounds)) if query.id not in seen][:missing]


def _missing(rounds: Sequence[Batch], sampling: RolloutConfig) -> int:
    """Groups with something to learn from that the batch still lacks."""
    return sampling.queries_per_step - sum(rewards_differ(group, sampling) for group in _groups(rounds))


def _groups(rounds: Sequence[Batch]) -> list[Group]:
    return [group for scored in rounds for group in scored.groups]
