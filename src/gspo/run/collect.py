"""A step's groups with their scores, sampled in one round, or in several where dynamic sampling asks for signal."""

from collections.abc import Sequence
from typing import Any

from gspo.learner.advantages import rewards_differ
from gspo.queries.order import query_indices
from gspo.reward.overlong import with_overlong_penalty
from gspo.reward.score import added_up, score
from gspo.rollout.engine import SamplingKey
from gspo.run.progress import Progress
from gspo.run.run import Run
from gspo.types import Batch, Group, Query


def collect(run: Run, progress: Progress, *, policy_version: int) -> tuple[Batch, int]:
    """The next step's groups, sampled and scored, and the number of rounds that were sampled; rank 0 does it."""
    return run.on_first(lambda: _collect(run, progress, policy_version))


def _collect(run: Run, progress: Progress, policy_version: int) -> tuple[Batch, int]:
    parts, sampling = run.parts, progress.sampling(run.recipe.rollout)
    watched: dict[str, Any] = {"check_stop": run.interrupt.check_stop, "show_progress": run.display.progress}
    # No query comes twice in a step, so that no two rounds draw the same random numbers.
    key = SamplingKey(seed=run.recipe.seed, step=progress.steps + 1)
    state = run.trainer_state(progress.steps)
    record_experts = run.recipe.actor.wants_engine_experts
    run.engine.publish(parts.policy, policy_version)
    rounds: list[Batch] = []
    groups: list[Group] = []
    has_signal: list[bool] = []  # for each group; without dynamic sampling every group is taken
    num_missing = sampling.queries_per_step  # groups with something to learn from that the batch still lacks
    while not rounds or (sampling.dynamic_sampling and num_missing > 0 and len(rounds) < sampling.max_rounds):
        queries = _queries(run, progress.steps + progress.extra_rounds + len(rounds), groups)[:num_missing]
        with run.clock.stage("rollout"):
            sampled = run.engine.sample(queries, sampling, key, record_experts=record_experts, **watched)
        with run.clock.stage("reward"):
            scored = score(sampled, parts.functions, state=state, warn=run.warn_once, **watched)
            rounds.append(with_overlong_penalty(scored, sampling))
        new = rounds[-1].groups
        groups += new
        differ = rewards_differ(new, sampling, run.recipe.actor)
        has_signal += differ if sampling.dynamic_sampling else [True] * len(new)
        num_missing = sampling.queries_per_step - sum(has_signal)
    # The first groups whose rewards differ and, where they are too few, the first of the others, in their order.
    order = sorted(range(len(groups)), key=lambda number: not has_signal[number])  # stable
    chosen = sorted(order[: sampling.queries_per_step])
    batch = Batch(
        groups=tuple(groups[number] for number in chosen),
        dropped=tuple(group for number, group in enumerate(groups) if number not in chosen),
        reward_seconds={name: sum(batch.reward_seconds[name] for batch in rounds) for name in rounds[0].reward_seconds},
        logged=added_up([batch.logged for batch in rounds]),
    )
    return batch, len(rounds)


def _queries(run: Run, number: int, sampled: Sequence[Group]) -> list[Query]:
    """The batch of that number in the order of the queries, without those sampled in this step."""
    queries = run.parts.queries.train
    indices = query_indices(
        number,
        num_queries=len(queries),
        queries_per_step=run.recipe.rollout.queries_per_step,
        seed=run.recipe.seed,
        shuffle=run.recipe.queries.shuffle and not run.parts.rows.num_streamed,
    )
    sampled_ids = {group.query.id for group in sampled}  # where an epoch ends, the next batch may have them again
    return [queries[index] for index in indices if queries[index].id not in sampled_ids]
