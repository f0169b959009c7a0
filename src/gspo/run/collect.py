"""A step's groups with their scores, sampled in one round, or in several where dynamic sampling asks for signal."""

from collections.abc import Sequence

from gspo.learner.batch import make_batch, rewards_differ
from gspo.queries.order import query_indices
from gspo.recipe.schema import Recipe, RolloutConfig
from gspo.reward.overlong import with_overlong_penalty
from gspo.reward.score import Scored, score
from gspo.rollout.source import sample_groups
from gspo.run.progress import Collected, Judged, Progress
from gspo.run.run import Run
from gspo.types import Appraisal, Batch, Group, Query


def collect(run: Run, progress: Progress, *, policy_version: int) -> tuple[Collected, int]:
    """The next step's groups, sampled and scored, and the number of rounds that were sampled."""
    recipe, parts, check_stop = run.recipe, run.parts, run.interrupt.check_stop
    rounds: list[tuple[Sequence[Group], Scored]] = []
    while True:
        with run.clock.stage("rollout"):
            groups = sample_groups(
                parts.policy,
                _queries(run, progress, rounds),
                recipe.rollout,
                group_size=recipe.rollout.group_size,
                seed=_sampling_seed(recipe, progress.steps + 1, len(rounds)),
                policy_version=policy_version,
                record_experts=recipe.actor.wants_engine_experts,
                check_stop=check_stop,
            )
        with run.clock.stage("reward"):
            scored = with_overlong_penalty(
                groups, score(groups, parts.functions, check_stop=check_stop), recipe.rollout
            )
        rounds.append((groups, scored))
        is_last = not recipe.rollout.dynamic_sampling or len(rounds) == recipe.rollout.max_rounds
        if is_last or _missing(rounds, recipe.rollout) <= 0:
            return chosen(rounds, recipe.rollout), len(rounds)


def batch_of(recipe: Recipe, collected: Collected, appraisal: Appraisal) -> Batch:
    """What was collected, with the advantages that the recipe asks for."""
    return make_batch(
        collected.groups,
        collected.scored.scores,
        recipe.actor,
        sampling=recipe.rollout,
        critic=recipe.critic,
        appraisal=appraisal,
        dropped=collected.dropped,
    )


def chosen(rounds: Sequence[tuple[Sequence[Group], Scored]], sampling: RolloutConfig) -> Collected:
    """The first groups whose rewards differ and, where they are too few, the first of the others, in their order."""
    judged, num_groups = _judged(rounds), sampling.queries_per_step
    order = sorted(range(len(judged)), key=lambda place: not rewards_differ(*judged[place], sampling))  # stable
    kept = [judged[place] for place in sorted(order[:num_groups])]
    seconds: dict[str, float] = {}
    for _, scored in rounds:
        for name, took in scored.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + took
    return Collected(
        groups=tuple(group for group, _ in kept),
        scored=Scored(scores=tuple(score for _, scores in kept for score in scores), seconds=seconds),
        dropped=tuple(judged[place] for place in sorted(order[num_groups:])),
    )


def _queries(run: Run, progress: Progress, rounds: Sequence[tuple[Sequence[Group], Scored]]) -> list[Query]:
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
    seen = {group.query.id for group, _ in _judged(rounds)}  # where an epoch ends, the next batch may have them again
    others = [everything[index] for index in indices if everything[index].id not in seen]
    return others[: _missing(rounds, recipe.rollout)]


def _sampling_seed(recipe: Recipe, step: int, round_number: int) -> int:
    """The sampler's seed of a step's round: far apart for neighbouring recipe seeds, and for rounds."""
    return (recipe.seed * 1_000_003 + step + round_number * 1_000_000_007) % 2**63


def _missing(rounds: Sequence[tuple[Sequence[Group], Scored]], sampling: RolloutConfig) -> int:
    """Groups with something to learn from that the batch still lacks."""
    return sampling.queries_per_step - sum(rewards_differ(*pair, sampling) for pair in _judged(rounds))


def _judged(rounds: Sequence[tuple[Sequence[Group], Scored]]) -> list[Judged]:
    judged = []
    for groups, scored in rounds:
        scores = iter(scored.scores)
        judged += [(group, tuple(next(scores) for _ in group.rollouts)) for group in groups]
    return judged
