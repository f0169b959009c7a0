"""Steps made by hand: a batch, what the update saw of it, and the line of metrics they give."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from gspo.learner.item import Trained

from gspo.learner.optimizer import StepReport
from gspo.learner.update import MiniBatchReport
from gspo.metrics.step import step_metrics
from gspo.recipe.schema import ActorConfig
from gspo.reward.score import Scored
from gspo.types import Batch, FinishReason, Group, Query, Rollout, Score

SECONDS = {"rollout": 2.0, "reward": 0.5, "likelihood": 0.25, "update": 4.0, "total": 7.0}


def rollout(length: int, *, cut: bool = False, logprob: float = -1.0) -> Rollout:
    reason: FinishReason = "length" if cut else "stop"
    return Rollout(
        response_ids=torch.full((length,), 5),
        text="x",
        sampler_logprobs=torch.full((length,), logprob),
        finish_reason=reason,
        policy_version=0,
    )


def batch(lengths: Sequence[Sequence[int]], rewards: Sequence[Sequence[float | None]], **given: Any) -> Batch:
    groups = tuple(
        Group(
            query=Query(id=f"q:{number}", prompt="p", text="p", prompt_ids=(1,), columns={}),
            rollouts=tuple(rollout(length, cut=length >= 9) for length in group),
        )
        for number, group in enumerate(lengths)
    )
    scores = tuple(Score(reward=reward, parts={"f": reward}) for group in rewards for reward in group)
    filled: dict[str, Any] = {"scores": scores, "advantages": (0.0,) * len(scores), **given}
    return Batch(groups=groups, **filled)


def trained(
    index: int,
    mini_batch: int,
    tokens: int,
    clipped: int,
    ratio: float,
    entropy: float = 1.0,
    old: Sequence[float] | None = None,
    **given: Any,
) -> Trained:
    return Trained(
        index=index,
        mini_batch=mini_batch,
        num_tokens=tokens,
        num_clipped=clipped,
        sequence_ratio=ratio,
        entropy_sum=entropy * tokens,
        old_logprobs=torch.full((tokens,), -1.0) if old is None else torch.tensor(old),
        log_ratios=torch.full((tokens,), math.log(ratio) if ratio > 0 else -math.inf),
        **given,
    )


def report(
    *items: Trained, loss: float = 0.0, norm: float = 1.0, rate: float = 1e-4, applied: bool = True, **given: Any
) -> MiniBatchReport:
    step = StepReport(grad_norm=norm, learning_rate=rate, applied=applied)
    return MiniBatchReport(loss=loss, step=step, trained=items, **given)


def metrics(batch: Batch, *reports: MiniBatchReport, **actor: Any) -> dict[str, Any]:
    """The line of a recipe whose actor has these settings."""
    scored = Scored(scores=batch.scores, seconds={"verifier": 0.5})
    return dict(step_metrics(batch, reports, SECONDS, scored=scored, actor=ActorConfig(**actor)))


TWO_GROUPS = batch([[2, 4], [6, 10]], [[1.0, 0.0], [0.5, 0.5]])
