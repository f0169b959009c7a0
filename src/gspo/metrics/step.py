"""The numbers of a step, under the names that docs/metrics.md defines."""

import resource
import sys
from collections.abc import Mapping, Sequence

import torch

from gspo.learner.update import MiniBatchReport
from gspo.metrics.clipping import clip_metrics
from gspo.metrics.critic import critic_metrics, reference_metrics
from gspo.metrics.experts import expert_metrics
from gspo.metrics.gradient import gradient_metrics
from gspo.metrics.numbers import Metrics, mean
from gspo.metrics.ratios import correction_metrics, mismatch_metrics, ratio_metrics
from gspo.metrics.rewards import group_metrics, response_metrics, reward_metrics, sampled
from gspo.metrics.table import SequenceTable, sequence_table
from gspo.recipe.schema import ActorConfig
from gspo.types import Batch


def step_metrics(
    batch: Batch,
    reports: Sequence[MiniBatchReport],
    seconds: Mapping[str, float],
    *,
    actor: ActorConfig | None = None,
) -> Metrics:
    """Everything a line of metrics.jsonl holds besides the step and evaluations."""
    actor, table = actor or ActorConfig(), sequence_table(batch.samples, len(reports))
    generated = sum(sample.num_written for sample in sampled(batch))
    return {
        **reward_metrics(batch),
        **group_metrics(batch),
        **response_metrics(batch),
        **clip_metrics(table, reports),
        **ratio_metrics(table, actor),
        **gradient_metrics(table, reports),
        **_policy_metrics(table, reports),
        **reference_metrics(batch.samples, reports, actor),
        **critic_metrics(batch.samples, reports),
        **correction_metrics(table, actor),
        **mismatch_metrics(batch.samples),
        **expert_metrics(batch.samples, reports),
        **{f"time/{name}_seconds": value for name, value in seconds.items()},
        **{f"reward/{name}/seconds": value for name, value in batch.reward_seconds.items()},
        "throughput/generated_tokens_per_second": generated / max(seconds["rollout"], 1e-9),
        "throughput/trained_tokens_per_second": table.total("num_tokens") / max(seconds["update"], 1e-9),
        "memory/peak_bytes": float(peak_bytes()),
    }


def peak_bytes() -> int:
    """The most memory held so far: on the GPU where there is one, else by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _policy_metrics(table: SequenceTable, reports: Sequence[MiniBatchReport]) -> Metrics:
    return {
        "policy/loss": mean([report.loss for report in reports]),
        "policy/grad_norm": mean([report.step.grad_norm for report in reports]),
        "policy/entropy": table.share("entropy_sum"),
        "policy/learning_rate": reports[-1].step.learning_rate,
        "policy/skipped_updates": float(sum(not report.step.applied for report in reports)),
    }
