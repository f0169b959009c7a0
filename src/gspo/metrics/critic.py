"""The numbers of the models beside the policy: its reference, its value model."""

import math
from collections.abc import Sequence

import torch

from gspo.learner.cutting import rollouts_of
from gspo.learner.update import MiniBatchReport
from gspo.metrics.numbers import Metrics, fraction, mean
from gspo.recipe.schema import ActorConfig
from gspo.types import Batch


def reference_metrics(batch: Batch, reports: Sequence[MiniBatchReport], actor: ActorConfig) -> Metrics:
    """How far the policy is from its reference; empty where it has none."""
    reference = batch.appraisal.reference_logprobs
    if not reference:
        return {}
    if actor.kl.place == "loss":
        by_mini_batch = [report.kl for report in reports]
        return {"reference/kl": mean(by_mini_batch), "reference/kl_by_mini_batch": by_mini_batch}
    rollouts = rollouts_of(batch)
    gaps = [float((rollouts[index].sampler_logprobs - one).double().mean()) for index, one in reference.items()]
    return {"reference/kl": mean(gaps)}


def critic_metrics(batch: Batch, reports: Sequence[MiniBatchReport]) -> Metrics:
    """What the value model knows of the returns, and its updates; empty where there is none."""
    if not batch.returns:
        return {}
    returns = torch.cat([batch.returns[index] for index in batch.returns]).double()
    values = torch.cat([batch.appraisal.values[index] for index in batch.returns]).double()
    unexplained = fraction(float((returns - values).var(correction=0)), float(returns.var(correction=0)))
    steps = [report.critic_step for report in reports if report.critic_step is not None]
    return {
        "critic/explained_variance": 1 - unexplained,
        "critic/value_mean": float(values.mean()),
        "critic/loss": mean([report.value_loss for report in reports]),
        "critic/grad_norm": mean([step.grad_norm for step in steps]),
        "critic/learning_rate": steps[-1].learning_rate if steps else math.nan,
    }
