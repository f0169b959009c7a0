"""Rewards and responses of a step: over all that was sampled, for what is trained on may be a choice of it."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from gspo.errors import FailureKind
from gspo.learner.batch import rewards_differ
from gspo.metrics.numbers import Metrics, mean
from gspo.types import Batch, Group, Score


def sampled_groups(batch: Batch) -> list[tuple[Group, tuple[Score, ...]]]:
    """Every group of the step with its scores, those that dynamic sampling has left out at the end."""
    scores = iter(batch.scores)
    return [*((group, tuple(next(scores) for _ in group.rollouts)) for group in batch.groups), *batch.dropped]


def reward_metrics(batch: Batch) -> Metrics:
    """Of all sampled rollouts: those kept by dynamic sampling alone would say more of the choice than of the policy."""
    scores = [score for _, group_scores in sampled_groups(batch) for score in group_scores]
    rewards = [score.reward for score in scores if score.reward is not None]
    metrics: Metrics = {
        "reward/mean": mean(rewards),
        "reward/std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "reward/unscored_fraction": 1 - len(rewards) / len(scores),
        **_failure_metrics(scores),
    }
    for name in scores[0].parts:
        applied = [part for score in scores if (part := score.parts[name]) is not None]
        if applied and len(scores[0].parts) > 1:
            metrics[f"reward/{name}/mean"] = mean(applied)
    return metrics


def group_metrics(batch: Batch) -> Metrics:
    """How many groups have something to learn from."""
    groups = sampled_groups(batch)
    varied = sum(rewards_differ(group, scores) for group, scores in groups)
    return {"group/sampled": float(len(groups)), "group/zero_variance_fraction": 1 - varied / len(groups)}


def response_metrics(batch: Batch) -> Metrics:
    """Of all sampled rollouts, but for what the loss leaves out of those that are trained on."""
    rollouts = [rollout for group, _ in sampled_groups(batch) for rollout in group.rollouts]
    return {
        "response/mean_tokens": mean([len(rollout.response_ids) for rollout in rollouts]),
        "response/truncated_fraction": mean([rollout.finish_reason == "length" for rollout in rollouts]),
        "response/masked_fraction": len(batch.masked) / len(batch.scores),
    }


def _failure_metrics(scores: Sequence[Score]) -> Metrics:
    masked = Counter(score.failure.kind for score in scores if score.failure is not None)
    return {
        "reward/masked_fraction": masked.total() / len(scores),
        **{f"reward/{kind}_rollouts": float(masked[kind]) for kind in get_args(FailureKind)},
    }
