"""A step's groups with their scores, sampled in one round, or in several where dynamic sampling asks for signal."""

from collections.abc import Sequence
from functools import partial

from gspo.learner.advantages import rewards_differ
from gspo.recipe.schema import RolloutConfig
from gspo.reward.overlong import with_overlong_penalty
from gspo.reward.score import score
from gspo.rollout.source import sample_groups
from gspo.run.run import Run
from gspo.types import Batch, Group, Query


def collect(run: Run, step: int, *, policy_version: int) -> Batch:
    """The step's groups; each round goes through the stages rollout and reward, so that a resumed run takes it up."""
    recipe, hand = run.recipe, run.progress.in_hand
    while True:
        number = len(hand.rounds)
        sample = partial(
            sample_groups,
            run.parts.policy,
            _queries(run, step, hand.rounds),
            recipe.rollout,
            group_size=recipe.rollout.group_size,
            seed=run.sampling_seed(step, number),
            policy_version=policy_version,
            record_experts=recipe.actor.wants_engine_experts,
        )
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
