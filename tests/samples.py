"""Samples, batches and updates for tests: what the stages before would have filled in, given by hand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo.learner.advantages import with_advantages
from gspo.learner.critic import Critic
from gspo.learner.loss import Denominators
from gspo.learner.micro_batching import Learner
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import MiniBatchReport, accumulate_gradient, update
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import ActorConfig, OptimizerConfig
from gspo.types import Batch, Group, Query, Sample, Score, SequenceStats


def query_of(prompt_ids: Sequence[int], number: int = 1) -> Query:
    """A query of which only the tokens matter."""
    return Query(id=f"test:{number}", prompt="", text="", prompt_ids=tuple(prompt_ids), columns={})


def sample_of(query: Query, token_ids: Sequence[int] | Tensor, **fields: Any) -> Sample:
    """A sample whose tokens the policy wrote, all of them where no `loss_mask` is given."""
    ids = torch.as_tensor(token_ids, dtype=torch.long)
    mask = fields.pop("loss_mask", torch.ones(len(ids), dtype=torch.bool))
    written = int(mask.sum())
    given: dict[str, Any] = {
        "text": "",
        "finish_reason": "length",
        "sampler_logprobs": torch.full((written,), -1.0),
        "versions": ((0, written),),
        **fields,
    }
    return Sample(query=query, token_ids=ids, loss_mask=mask, **given)


def sample_from(sequence: TokenSequence, **fields: Any) -> Sample:
    """The sample that a sequence of tokens is read as; `routing_replay: engine` replays its experts."""
    return sample_of(query_of(sequence.prompt_ids), sequence.response_ids, experts=sequence.experts, **fields)


def sequence_of(sample: Sample) -> TokenSequence:
    """Its tokens, without experts to be replayed."""
    return TokenSequence(prompt_ids=sample.query.prompt_ids, response_ids=sample.token_ids)


def sequences_of(batch: Batch) -> list[TokenSequence]:
    return [sequence_of(sample) for sample in batch.samples]


def changed(batch: Batch, **columns: Sequence[Any]) -> Batch:
    """The batch with these fields of its samples, one value for each sample."""
    rows = zip(batch.samples, *columns.values(), strict=True)
    return batch.with_changed(
        {sample: replace(sample, **dict(zip(columns, row, strict=True))) for sample, *row in rows}
    )


def scored(groups: Sequence[Group], scores: Sequence[Score | float | None]) -> Batch:
    """The groups with these scores or rewards, one for each sample."""
    given = [score if isinstance(score, Score) else Score(reward=score, parts={}) for score in scores]
    samples = iter(given)
    filled = (Group(samples=tuple(replace(s, score=next(samples)) for s in group.samples)) for group in groups)
    batch = Batch(groups=tuple(filled))
    assert len(batch.samples) == len(given)
    return batch


def advantaged(groups: Sequence[Group], scores: Sequence[Score | float | None], *rest: Any, **keywords: Any) -> Batch:
    """The scored groups with their advantages."""
    return with_advantages(scored(groups, scores), *rest, **keywords)


def with_old(batch: Batch, old: Mapping[int, Tensor]) -> Batch:
    """The batch with log-likelihoods of π_old for the samples at these places."""
    return changed(batch, old_logprobs=[old.get(index) for index in range(len(batch.samples))])


class Step(NamedTuple):
    """A mini-batch of an update: its report, and what was seen of its samples, by their place in the batch."""

    report: MiniBatchReport
    trained: dict[int, SequenceStats]
    batch: Batch


def updates(policy: Policy, optimizer: Optimizer, batch: Batch, actor: ActorConfig, **keywords: Any) -> Iterator[Step]:
    """The mini-batches of an update; keywords are those of `Learner`."""
    learner = Learner(policy=policy, optimizer=optimizer, actor=actor, **{"temperature": 1.0, **keywords})
    for number, (report, after) in enumerate(update(learner, batch)):
        stats = enumerate(sample.stats for sample in after.samples)
        yield Step(report, {index: own for index, own in stats if own is not None and own.mini_batch == number}, after)


def accumulated(
    policy: Policy,
    samples: Sequence[Sample],
    actor: ActorConfig,
    denominators: Denominators,
    mini_batch: int = 0,
    *,
    temperature: float = 1.0,
    critic: Critic | None = None,
) -> tuple[MiniBatchReport, list[SequenceStats]]:
    """The gradient of one mini-batch, added to the parameters; what was seen of its samples, in their order."""
    learner = Learner(
        policy=policy,
        optimizer=Optimizer(policy.model, OptimizerConfig(), total_steps=1),  # gradient_noise alone asks it
        actor=actor,
        temperature=temperature,
        critic=critic,
    )
    report, trained = accumulate_gradient(learner, samples, denominators, mini_batch)
    assert list(trained) == list(samples)
    return report, [sample.stats for sample in trained.values() if sample.stats is not None]


def advantages_of(batch: Batch) -> list[float]:
    return [sample.advantage for sample in batch.samples]


def token_advantages_of(sample: Sample) -> Tensor:
    """One a token, or the sample's own alone."""
    return torch.tensor([sample.advantage]) if sample.token_advantages is None else sample.token_advantages


def regrouped(groups: Sequence[Group], samples: Sequence[Sample]) -> tuple[Group, ...]:
    """The groups with other samples in their places."""
    following = iter(samples)
    return tuple(Group(samples=tuple(next(following) for _ in group.samples)) for group in groups)


def learner_of(policy: Policy, actor: ActorConfig, **fields: Any) -> Learner:
    """A learner that makes no optimiser step."""
    given: dict[str, Any] = {"optimizer": Optimizer.__new__(Optimizer), "temperature": 1.0, **fields}
    return Learner(policy=policy, actor=actor, **given)


def scores_of(batch: Batch) -> list[Score]:
    return [sample.score for sample in batch.samples if sample.score is not None]
