"""A step's groups with their scores, sampled in one round, or in several where dynamic sampling asks for signal."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gspo.learner.batch import make_batch, rewards_differ
from gspo.recipe.schema import Recipe, RolloutConfig
from gspo.reward.overlong import with_overlong_penalty
from gspo.reward.score import Scored, score
from gspo.rollout.random_numbers import SamplingKey
from gspo.run.progress import Round
from gspo.run.run import Run
from gspo.types import Appraisal, Batch, Group, Query, Score

Judged = tuple[Group, tuple[Score, ...]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a step trains on, and what it has sampled besides."""

    groups: tuple[Group, ...]
    scored: Scored  # of those groups; the seconds are of all calls
    dropped: tuple[Judged, ...] = ()  # groups of equal rewards that others have taken the place of


def collect(run: Run, step: int, *, policy_version: int) -> Collected:
    """The step's groups; each round goes through the stages rollout and reward, so that a resumed run takes it up."""
    recipe, hand = run.recipe, run.progress.in_hand
    while True:
        sample = partial(_sample, run, step, hand.rounds, policy_version)
        groups = run.stage("rollout", sample)
        scored = run.stage("reward", partial(_scored, run, groups))
        rounds = (*hand.rounds, Round(groups=groups, scored=scored))
        last = not recipe.rollout.dynamic_sampling or len(rounds) == recipe.rollout.max_rounds
        if last or _missing(rounds, recipe.rollout) <= 0:
            return chosen(rounds, recipe.rollout)
        hand.rounds, hand.rollout, hand.reward = rounds, None, None


def batch_of(recipe: Recipe, found: Collected, appraisal: Appraisal) -> Batch:
    """What was collected, with the advantages that the recipe asks for."""
    return make_batch(
        found.groups,
        found.scored.scores,
        recipe.actor,
        sampling=recipe.rollout,
        critic=recipe.critic,
        appraisal=appraisal,
        dropped=found.dropped,
    )


def chosen(rounds: Sequence[Round], sampling: RolloutConfig) -> Collected:
    """The first groups whose rewards differ and, where they are too few, the first of the others, in their order."""
    judged, num_groups = _judged(rounds), sampling.queries_per_step
    order = sorted(range(len(judged)), key=lambda place: not rewards_differ(*judged[place], sampling))  # stable
    taken = sorted(order[:num_groups])
    kept = [judged[place] for place in taken]
    seconds: dict[str, float] = {}
    for one in rounds:
        for name, took in one.scored.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + took
    return Collected(
        groups=tuple(group for group, _ in kept),
        scored=Scored(scores=tuple(score for _, scores in kept for score in scores), seconds=seconds),
        dropped=tuple(judged[place] for place in sorted(order[num_groups:])),
    )


def _sample(run: Run, step: int, rounds: Sequence[Round], policy_version: int) -> tuple[Group, ...]:
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


def _scored(run: Run, groups: Sequence[Group]) -> Scored:
    return with_overlong_penalty(groups, score(groups, run.parts.functions), run.recipe.rollout)


def _queries(run: Run, step: int, rounds: Sequence[Round]) -> list[Query]:
    """Of the first round a batch of the order; of a later one as many as are missing, from the next batch."""
    if not rounds:
        return run.queries(step)
    missing = _missing(rounds, run.recipe.rollout)
    seen = {group.query.id for group, _ in _judged(rounds)}  # where an epoch ends, the next batch may have them again
    return [query for query in run.queries(step, len(rounds)) if query.id not in seen][:missing]


def _missing(rounds: Sequence[Round], sampling: RolloutConfig) -> int:
    """Groups with something to learn from that the batch still lacks."""
    return sampling.queries_per_step - sum(rewards_differ(*one, sampling) for one in _judged(rounds))


def _judged(rounds: Sequence[Round]) -> list[Judged]:
    found = []
    for one in rounds:
        scores = iter(one.scored.scores)
        found += [(group, tuple(next(scores) for _ in group.rollouts)) for group in one.groups]
    return found
