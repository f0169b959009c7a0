"""The numbers of the models beside the policy: its reference, its value model."""

import math
from collections.abc import Sequence

import torch

from gspo.learner.update import MiniBatchReport
from gspo.metrics.numbers import Metrics, fraction, mean
from gspo.recipe.schema import ActorConfig
from gspo.types import Sample


def reference_metrics(samples: Sequence[Sample], reports: Sequence[MiniBatchReport], actor: ActorConfig) -> Metrics:
    """How far the policy is from its reference; empty where it has none."""
    pairs = [(s.sampler_logprobs, s.reference_logprobs) for s in samples if s.reference_logprobs is not None]
    if not pairs:
        return {}
    if actor.kl.place == "loss":
        by_mini_batch = [report.kl for report in reports]
        return {"reference/kl": mean(by_mini_batch), "reference/kl_by_mini_batch": by_mini_batch}
    return {"reference/kl": mean([float((sampler - reference).double().mean()) for sampler, reference in pairs])}


def critic_metrics(samples: Sequence[Sample], reports: Sequence[MiniBatchReport]) -> Metrics:
    """What the value model knows of the returns, and its updates; empty where there is none."""
    pairs = [(s.returns, s.values) for s in samples if s.returns is not None and s.values is not None]
    if not pairs:
        return {}
    returns, values = (torch.cat(column).double() for column in zip(*pairs, strict=True))
    unexplained = fraction(float((returns - values).var(correction=0)), float(returns.var(correction=0)))
    steps = [report.critic_step for report in reports if report.critic_step is not None]
    return {
        "critic/explained_variance": 1 - unexplained,
        "critic/value_mean": float(values.mean()),
        "critic/loss": mean([report.value_loss for report in reports]),
        "critic/grad_norm": mean([step.grad_norm for step in steps]),
        "critic/learning_rate": steps[-1].learning_rate if steps else math.nan,
    }
