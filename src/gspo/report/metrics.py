"""The numbers of a step, under the names that docs/metrics.md defines."""

import math
import resource
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from gspo.policy.item import Trained
from gspo.policy.old_policy import Old
from gspo.policy.update import MiniBatchReport
from gspo.records import Batch, FailureKind, Rollout
from gspo.report.experts import Metrics, expert_metrics
from gspo.reward.score import Scored


def step_metrics(
    batch: Batch,
    reports: Sequence[MiniBatchReport],
    seconds: Mapping[str, float],
    *,
    scored: Scored,
    old: Mapping[int, Old] | None = None,
) -> Metrics:
    """Everything a line of metrics.jsonl holds besides the step and evaluations."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    trained = [item for report in reports for item in report.trained]
    return {
        **_reward_metrics(batch),
        **_failure_metrics(batch),
        "response/mean_tokens": statistics.fmean(len(rollout.response_ids) for rollout in rollouts),
        "response/truncated_fraction": statistics.fmean(rollout.finish_reason == "length" for rollout in rollouts),
        **_ratio_metrics(trained, len(reports)),
        **_policy_metrics(reports, trained),
        **_mismatch_metrics(rollouts, trained),
        **expert_metrics(reports, rollouts, old),
        **{f"time/{name}_seconds": value for name, value in seconds.items()},
        **{f"reward/{name}/seconds": value for name, value in scored.seconds.items()},
        "throughput/generated_tokens_per_second": sum(len(rollout.response_ids) for rollout in rollouts)
        / max(seconds["rollout"], 1e-9),
        "throughput/trained_tokens_per_second": sum(item.num_tokens for item in trained) / max(seconds["update"], 1e-9),
        "memory/peak_bytes": float(peak_bytes()),
    }


def peak_bytes() -> int:
    """The most memory held so far: on the GPU where there is one, else by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reward_metrics(batch: Batch) -> Metrics:
    rewards = [score.reward for score in batch.scores if score.reward is not None]
    scores, varied = iter(batch.scores), 0
    for group in batch.groups:
        varied += len({score.reward for score in [next(scores) for _ in group.rollouts]} - {None}) > 1
    metrics: Metrics = {
        "reward/mean": statistics.fmean(rewards) if rewards else math.nan,
        "reward/std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "reward/unscored_fraction": 1 - len(rewards) / len(batch.scores),
        "group/zero_variance_fraction": 1 - varied / len(batch.groups),
    }
    for name in batch.scores[0].parts:
        applied = [part for score in batch.scores if (part := score.parts[name]) is not None]
        if applied and len(batch.scores[0].parts) > 1:
            metrics[f"reward/{name}/mean"] = statistics.fmean(applied)
    return metrics


def _failure_metrics(batch: Batch) -> Metrics:
    masked = Counter(score.failure.kind for score in batch.scores if score.failure is not None)
    return {
        "reward/masked_fraction": masked.total() / len(batch.scores),
        **{f"reward/{kind}_rollouts": float(masked[kind]) for kind in get_args(FailureKind)},
    }


def _ratio_metrics(trained: Sequence[Trained], num_mini_batches: int) -> Metrics:
    """Over the sequences that carried an advantage; by mini-batch too, for the first one's ratio is 1 always."""

    def clipped_tokens(items: Sequence[Trained]) -> float:
        return sum(item.num_clipped for item in items) / max(1, sum(item.num_tokens for item in items))

    ratios = [item.sequence_ratio for item in trained] or [math.nan]
    return {
        "clip/sequence_fraction": sum(item.num_clipped > 0 for item in trained) / max(1, len(trained)),
        "clip/token_fraction": clipped_tokens(trained),
        "clip/token_fraction_by_mini_batch": [
            clipped_tokens([item for item in trained if item.mini_batch == number])
            for number in range(num_mini_batches)
        ],
        "ratio/sequence_mean": statistics.fmean(ratios),
        "ratio/sequence_min": min(ratios),
        "ratio/sequence_max": max(ratios),
    }


def _policy_metrics(reports: Sequence[MiniBatchReport], trained: Sequence[Trained]) -> Metrics:
    tokens = sum(item.num_tokens for item in trained) or math.nan
    return {
        "policy/loss": statistics.fmean(report.loss for report in reports),
        "policy/grad_norm": statistics.fmean(report.step.grad_norm for report in reports),
        "policy/entropy": sum(item.entropy_sum for item in trained) / tokens,
        "policy/learning_rate": reports[-1].step.learning_rate,
        "policy/skipped_updates": float(sum(not report.step.applied for report in reports)),
    }


def _mismatch_metrics(rollouts: Sequence[Rollout], trained: Sequence[Trained]) -> Metrics:
    """Engine against π_old, token by token; exactly 0 where the engine's own log-likelihoods are π_old."""
    gaps = [(item.old_logprobs - rollouts[item.index].sampler_logprobs).abs() for item in trained]
    gap = torch.cat(gaps) if gaps else torch.zeros(1)
    return {"mismatch/logprob_gap_mean": float(gap.mean()), "mismatch/logprob_gap_max": float(gap.max())}
