"""The numbers of a step, under the names that docs/metrics.md defines."""

import math
import resource
import sys
from collections.abc import Mapping, Sequence

import torch

from gspo.learner.cutting import rollouts_of
from gspo.learner.item import Trained
from gspo.learner.old_policy import Old
from gspo.learner.update import MiniBatchReport
from gspo.metrics.clipping import clip_metrics
from gspo.metrics.critic import critic_metrics, reference_metrics
from gspo.metrics.experts import expert_metrics
from gspo.metrics.gradient import gradient_metrics
from gspo.metrics.numbers import Metrics, mean
from gspo.metrics.ratios import correction_metrics, mismatch_metrics, ratio_metrics
from gspo.metrics.rewards import group_metrics, response_metrics, reward_metrics, sampled_groups
from gspo.recipe.schema import ActorConfig
from gspo.reward.score import Scored
from gspo.types import Batch


def step_metrics(
    batch: Batch,
    reports: Sequence[MiniBatchReport],
    seconds: Mapping[str, float],
    *,
    scored: Scored,
    actor: ActorConfig | None = None,
    old: Mapping[int, Old] | None = None,
) -> Metrics:
    """Everything a line of metrics.jsonl holds besides the step and evaluations."""
    actor, rollouts = actor or ActorConfig(), rollouts_of(batch)
    trained = [item for report in reports for item in report.trained]
    return {
        **reward_metrics(batch),
        **group_metrics(batch),
        **response_metrics(batch),
        **clip_metrics(batch, reports, trained),
        **ratio_metrics(rollouts, trained, len(reports), actor),
        **gradient_metrics(batch, reports, trained),
        **_policy_metrics(reports, trained),
        **reference_metrics(batch, reports, actor),
        **critic_metrics(batch, reports),
        **correction_metrics(trained, len(reports), actor),
        **mismatch_metrics(rollouts, trained),
        **expert_metrics(reports, rollouts, old),
        **{f"time/{name}_seconds": value for name, value in seconds.items()},
        **{f"reward/{name}/seconds": value for name, value in scored.seconds.items()},
        **_throughput_metrics(batch, trained, seconds),
        "memory/peak_bytes": float(peak_bytes()),
    }


def peak_bytes() -> int:
    """The most memory held so far: on the GPU where there is one, else by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _policy_metrics(reports: Sequence[MiniBatchReport], trained: Sequence[Trained]) -> Metrics:
    tokens = sum(item.num_tokens for item in trained) or math.nan
    return {
        "policy/loss": mean([report.loss for report in reports]),
        "policy/grad_norm": mean([report.step.grad_norm for report in reports]),
        "policy/entropy": sum(item.entropy_sum for item in trained) / tokens,
        "policy/learning_rate": reports[-1].step.learning_rate,
        "policy/skipped_updates": float(sum(not report.step.applied for report in reports)),
    }


def _throughput_metrics(batch: Batch, trained: Sequence[Trained], seconds: Mapping[str, float]) -> Metrics:
    sampled = [rollout for group, _ in sampled_groups(batch) for rollout in group.rollouts]
    generated = sum(len(rollout.response_ids) for rollout in sampled)
    return {
        "throughput/generated_tokens_per_second": generated / max(seconds["rollout"], 1e-9),
        "throughput/trained_tokens_per_second": sum(item.num_tokens for item in trained) / max(seconds["update"], 1e-9),
    }
