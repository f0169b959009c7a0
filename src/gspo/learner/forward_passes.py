"""What models compute of a batch before it is trained on: the reference, the critic, and the policy that is π_old."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from gspo.learner.micro_batching import Learner, for_each_sample, mini_batches, split_tokens, trained_samples
from gspo.model.likelihood import response_likelihood
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.types import Batch, Experts


def score_with_reference_and_critic(batch: Batch, learner: Learner, reference: Policy | None) -> Batch:
    """The batch with reference log-likelihoods and values of every scored sample, where the recipe has such models."""

    def logprobs(policy: Policy, sequences: Sequence[TokenSequence]) -> Float[Tensor, "N"]:
        free = [replace(sequence, experts=None) for sequence in sequences]  # its routers choose for themselves
        return response_likelihood(policy, free, temperature=learner.temperature).logprobs

    if reference is not None:
        batch = _with_scored(batch, learner, "reference_logprobs", lambda part: logprobs(reference, part))
    if learner.critic is not None:
        batch = _with_scored(batch, learner, "values", learner.critic.values)
    return batch


def _with_scored(
    batch: Batch, learner: Learner, field: str, compute: Callable[[Sequence[TokenSequence]], Float[Tensor, "N"]]
) -> Batch:
    """The batch with a field of its scored samples filled in, token by token."""
    samples = [sample for sample in batch.samples if sample.reward is not None]
    values = for_each_sample(learner, samples, lambda part: split_tokens(compute(part), part))
    columns: list[dict[str, Any]] = [{field: own} for own in values]
    return batch.with_changed({s: replace(s, **own) for s, own in zip(samples, columns, strict=True)})


def compute_old_logprobs(batch: Batch, learner: Learner) -> Batch:
    """The batch with π_old of the samples that are trained on: as the engine had it, or the policy itself (§5.4).

    The policy's own is not computed for the first mini-batch, whose forward pass in the update is π_old's. Routers
    that are to replay the policy's experts need its pass even where the engine's log-likelihoods are taken.
    """
    actor = learner.actor
    of_engine = actor.old_logprobs == "engine"
    if of_engine:
        samples = trained_samples(batch.groups, actor)
        batch = batch.with_changed({s: replace(s, old_logprobs=s.sampler_logprobs) for s in samples})
    if of_engine and actor.routing_replay != "policy":
        return batch

    def own(sequences: Sequence[TokenSequence]) -> Iterator[tuple[Float[Tensor, "_"], Experts | None]]:
        likelihood = response_likelihood(learner.policy, sequences, temperature=learner.temperature)
        experts = likelihood.experts or [None] * len(sequences)
        return zip(split_tokens(likelihood.logprobs, sequences), experts, strict=True)

    changed = {}
    for groups in mini_batches(batch, actor.mini_batches)[1:]:
        samples = trained_samples(groups, actor)
        for sample, (logprobs, experts) in zip(samples, for_each_sample(learner, samples, own), strict=True):
            old_logprobs = sample.old_logprobs if of_engine else logprobs
            changed[sample] = replace(sample, old_logprobs=old_logprobs, old_experts=experts)
    return batch.with_changed(changed)
