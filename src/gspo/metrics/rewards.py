"""Rewards and responses of a step: over all that was sampled, for what is trained on may be a choice of it."""

import statistics
from collections import Counter
from typing import get_args

from gspo.errors import FailureKind
from gspo.learner.advantages import rewards_differ
from gspo.metrics.numbers import Metrics, mean
from gspo.types import Batch, Sample


def sampled(batch: Batch) -> list[Sample]:
    """Every sample of the step, those that dynamic sampling has dropped at the end."""
    return [sample for group in (*batch.groups, *batch.dropped) for sample in group.samples]


def reward_metrics(batch: Batch) -> Metrics:
    """Of all samples: those kept by dynamic sampling alone would say more of the choice than of the policy."""
    scores = [sample.score for sample in sampled(batch) if sample.score is not None]
    rewards = [score.reward for score in scores if score.reward is not None]
    failures = Counter(score.failure.kind for score in scores if score.failure is not None)
    metrics: Metrics = {
        "reward/mean": mean(rewards),
        "reward/std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "reward/unscored_fraction": 1 - len(rewards) / len(scores),
        "reward/masked_fraction": failures.total() / len(scores),
        **{f"reward/{kind}_rollouts": float(failures[kind]) for kind in get_args(FailureKind)},
    }
    for name in scores[0].parts:
        applied = [part for score in scores if (part := score.parts[name]) is not None]
        if applied and len(scores[0].parts) > 1:
            metrics[f"reward/{name}/mean"] = mean(applied)
    return metrics


def group_metrics(batch: Batch) -> Metrics:
    """How many groups have something to learn from."""
    groups = (*batch.groups, *batch.dropped)
    varied = sum(map(rewards_differ, groups))
    return {"group/sampled": float(len(groups)), "group/zero_variance_fraction": 1 - varied / len(groups)}


def response_metrics(batch: Batch) -> Metrics:
    """Of all samples, but for what the loss leaves out of those that are trained on."""
    samples = sampled(batch)
    return {
        "response/mean_tokens": mean([sample.num_tokens for sample in samples]),
        "response/truncated_fraction": mean([sample.finish_reason == "length" for sample in samples]),
        "response/masked_fraction": sum(sample.masked for sample in batch.samples) / len(batch.samples),
    }
