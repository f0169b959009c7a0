"""What models compute of a batch before it is trained on: the reference, the critic, and the policy that is π_old."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

from gspo.learner.micro_batching import Learner, for_each_sample, mini_batches, split_tokens, trained_samples
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood, squared_errors
from gspo.types import Batch, Sample

Fields = dict[str, Any]  # those of a sample that a forward pass fills in


def score_with_models(batch: Batch, learner: Learner, reference: Policy | None, teacher: Policy | None = None) -> Batch:
    """The batch with what the models beside the policy say of every scored sample, where the recipe has such models.

    That is the reference's and the teacher's log-likelihoods, and the critic's values. A teacher reads its own prompt.
    For an optimal token baseline the policy itself says how far each token was from certain.
    """
    critic = learner.critic

    def logprobs(model: Policy, name: str, sequences: Sequence[TokenSequence]) -> Iterator[Fields]:
        free = [replace(sequence, experts=None) for sequence in sequences]  # its routers choose for themselves
        packed = response_likelihood(model, free, temperature=learner.temperature).logprobs
        return ({name: row} for row in split_tokens(packed, sequences))

    def values(sequences: Sequence[TokenSequence]) -> Iterator[Fields]:
        assert critic is not None
        return ({"values": row} for row in split_tokens(critic.values(sequences), sequences))

    def errors(sequences: Sequence[TokenSequence]) -> Iterator[Fields]:
        packed = squared_errors(learner.policy, sequences, learner.temperature)
        return ({"squared_errors": row} for row in split_tokens(packed, sequences))

    def scored() -> list[Sample]:
        return [sample for sample in batch.samples if sample.reward is not None]

    if reference is not None:
        batch = _with_fields(batch, learner, scored(), partial(logprobs, reference, "reference_logprobs"))
    if teacher is not None:
        compute = partial(logprobs, teacher, "teacher_logprobs")
        batch = _with_fields(batch, learner, scored(), compute, read=_as_teacher_reads)
    if critic is not None:
        batch = _with_fields(batch, learner, scored(), values)
    if learner.actor.advantage == "optimal_token_baseline":
        batch = _with_fields(batch, learner, scored(), errors)
    return batch


def _as_teacher_reads(sample: Sample) -> Sample:
    query = sample.query
    return replace(sample, query=replace(query, prompt_ids=query.teacher_ids or query.prompt_ids))


def compute_old_logprobs(batch: Batch, learner: Learner) -> Batch:
    """The batch with π_old of the samples that are trained on: as the engine had it, or the policy itself (§5.4).

    The policy's own is not computed for the first mini-batch, whose forward pass in the update is π_old's. Routers
    that are to replay the policy's experts need its pass even where the engine's log-likelihoods are taken.
    """
    actor = learner.actor
    of_engine = actor.old_logprobs == "engine"
    if of_engine:
        samples = trained_samples(batch.groups, actor)
        batch = batch.with_changed({s: replace(s, old_logprobs=s.engine_logprobs) for s in samples})
    if of_engine and actor.routing_replay != "policy":
        return batch

    def policy_fields(sequences: Sequence[TokenSequence]) -> Iterator[Fields]:
        likelihood = response_likelihood(learner.policy, sequences, temperature=learner.temperature)
        rows = zip(split_tokens(likelihood.logprobs, sequences), likelihood.experts or repeat(None), strict=False)
        return ({"old_experts": row} | ({} if of_engine else {"old_logprobs": logprobs}) for logprobs, row in rows)

    for groups in mini_batches(batch, actor.mini_batches)[1:]:
        batch = _with_fields(batch, learner, trained_samples(groups, actor), policy_fields)
    return batch


def _with_fields(
    batch: Batch,
    learner: Learner,
    samples: Sequence[Sample],
    compute: Callable[[Sequence[TokenSequence]], Iterable[Fields]],
    read: Callable[[Sample], Sample] = lambda sample: sample,
) -> Batch:
    """The batch with some of its samples' fields filled in by forward passes over them, as they are to be read."""
    rows = zip(samples, for_each_sample(learner, [*map(read, samples)], compute), strict=True)
    return batch.with_changed({sample: replace(sample, **fields) for sample, fields in rows})
