"""Steps made by hand: a batch, what the update saw of it, and the line of metrics they give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tests.samples import changed, query_of, sample_of, scored

from gspo.learner.optimizer import StepReport
from gspo.learner.update import MiniBatchReport
from gspo.metrics.step import step_metrics
from gspo.recipe.sections import ActorConfig
from gspo.types import Batch, FinishReason, Group, Sample, Score, SequenceStats

SECONDS = {"rollout": 2.0, "reward": 0.5, "likelihood": 0.25, "update": 4.0, "total": 7.0}


class Trained(NamedTuple):
    """What the update saw of the sample at this place in the batch."""

    place: int
    stats: SequenceStats


class MiniBatch(NamedTuple):
    """A report, and the samples that the mini-batch trained."""

    report: MiniBatchReport
    items: tuple[Trained, ...]


def sample(number: int, length: int, *, cut: bool = False, logprob: float = -1.0) -> Sample:
    reason: FinishReason = "length" if cut else "stop"
    logprobs = torch.full((length,), logprob)
    return sample_of(query_of([1], number), [5] * length, text="x", sampler_logprobs=logprobs, finish_reason=reason)


def batch(
    lengths: Sequence[Sequence[int]],
    rewards: Sequence[Sequence[float | None]],
    *,
    scores: Sequence[Score] | None = None,
    dropped: Sequence[Group] = (),
    **columns: Sequence[Any] | Mapping[int, Any],
) -> Batch:
    """Columns are fields of the samples: a value for each, or values by place."""
    groups = [
        Group(samples=tuple(sample(number, length, cut=length >= 9) for length in group))
        for number, group in enumerate(lengths)
    ]
    given = scores or [Score(reward=reward, parts={"f": reward}) for group in rewards for reward in group]
    places = range(len(given))
    full = {
        name: [values.get(place) for place in places] if isinstance(values, Mapping) else values
        for name, values in columns.items()
    }
    return replace(changed(scored(groups, given), **full), dropped=tuple(dropped))


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
    stats = SequenceStats(
        mini_batch=mini_batch,
        num_tokens=tokens,
        num_clipped=clipped,
        sequence_ratio=ratio,
        entropy_sum=entropy * tokens,
        old_logprobs=torch.full((tokens,), -1.0) if old is None else torch.tensor(old),
        log_ratios=torch.full((tokens,), math.log(ratio) if ratio > 0 else -math.inf),
        **given,
    )
    return Trained(index, stats)


def report(
    *items: Trained, loss: float = 0.0, norm: float = 1.0, rate: float = 1e-4, applied: bool = True, **given: Any
) -> MiniBatch:
    step = StepReport(grad_norm=norm, learning_rate=rate, applied=applied)
    return MiniBatch(MiniBatchReport(loss=loss, step=step, num_trained=len(items), **given), items)


def after_update(batch: Batch, *mini_batches: MiniBatch) -> Batch:
    """The batch with what the mini-batches saw of its samples."""
    seen = dict(item for mini_batch in mini_batches for item in mini_batch.items)
    return changed(batch, stats=[seen.get(index) for index in range(len(batch.samples))])


def metrics(batch: Batch, *mini_batches: MiniBatch, **actor: Any) -> dict[str, Any]:
    """The line of a recipe whose actor has these settings."""
    timed = replace(after_update(batch, *mini_batches), reward_seconds={"verifier": 0.5})
    reports = [mini_batch.report for mini_batch in mini_batches]
    return dict(step_metrics(timed, reports, SECONDS, ActorConfig(**actor)))


TWO_GROUPS = batch([[2, 4], [6, 10]], [[1.0, 0.0], [0.5, 0.5]])
