"""A step's groups with their scores, sampled in one round, or in several where dynamic sampling asks for signal."""

from collections.abc import Sequence

from gspo.learner.advantages import rewards_differ
from gspo.queries.order import query_indices
from gspo.recipe.sections import RolloutConfig
from gspo.reward.overlong import with_overlong_penalty
from gspo.reward.score import score
from gspo.rollout.engine import SamplingKey
from gspo.run.progress import Progress
from gspo.run.run import Run
from gspo.types import Batch, Group, Query


def collect(run: Run, progress: Progress, *, policy_version: int) -> tuple[Batch, int]:
    """The next step's groups, sampled and scored, and the number of rounds that were sampled."""
    recipe, parts, check_stop = run.recipe, run.parts, run.interrupt.check_stop
    parts.engine.publish(parts.policy, policy_version)
    rounds: list[Batch] = []
    while True:
        with run.clock.stage("rollout"):
            groups = parts.engine.sample(
                _queries(run, progress, rounds),
                recipe.rollout,
                # No query comes twice in a step, so that no two rounds draw the same random numbers.
                SamplingKey(seed=recipe.seed, step=progress.steps + 1),
                record_experts=recipe.actor.wants_engine_experts,
                check_stop=check_stop,
            )
        with run.clock.stage("reward"):
            batch = score(groups, parts.functions, check_stop=check_stop)
            rounds.append(with_overlong_penalty(batch, recipe.rollout))
        is_last = not recipe.rollout.dynamic_sampling or len(rounds) == recipe.rollout.max_rounds
        if is_last or _missing(rounds, recipe.rollout) <= 0:
            return choose_groups(rounds, recipe.rollout), len(rounds)


def choose_groups(rounds: Sequence[Batch], sampling: RolloutConfig) -> Batch:
    """The first groups whose rewards differ and, where they are too few, the first of the others, in their order."""
    groups, size = _groups(rounds), sampling.queries_per_step
    order = sorted(range(len(groups)), key=lambda number: not rewards_differ(groups[number], sampling))  # stable
    names = rounds[0].reward_seconds
    return Batch(
        groups=tuple(groups[number] for number in sorted(order[:size])),
        dropped=tuple(groups[number] for number in sorted(order[size:])),
        reward_seconds={name: sum(batch.reward_seconds[name] for batch in rounds) for name in names},
    )


def _queries(run: Run, progress: Progress, rounds: Sequence[Batch]) -> list[Query]:
    """Of the first round a batch of the order; of a later one as many as are missing, from the next batch."""
    everything, recipe = run.parts.queries.train, run.recipe
    indices = query_indices(
        progress.steps + progress.extra_rounds + len(rounds),
        num_queries=len(everything),
        queries_per_step=recipe.rollout.queries_per_step,
        seed=recipe.seed,
        shuffle=recipe.queries.shuffle,
    )
    if not rounds:
        return [everything[index] for index in indices]
    seen = {group.query.id for group in _groups(rounds)}  # where an epoch ends, the next batch may have them again
    others = [everything[index] for index in indices if everything[index].id not in seen]
    return others[: _missing(rounds, recipe.rollout)]


def _missing(rounds: Sequence[Batch], sampling: RolloutConfig) -> int:
    """Groups with something to learn from that the batch still lacks."""
    return sampling.queries_per_step - sum(rewards_differ(group, sampling) for group in _groups(rounds))


def _groups(rounds: Sequence[Batch]) -> list[Group]:
    return [group for batch in rounds for group in batch.groups]
