"""What is known of π_old on a batch: log-likelihoods and experts, the engine's or the policy's own."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from gspo.learner.micro_batching import for_each_sample, mini_batches, split_tokens, trained_samples
from gspo.learner.update import Learner
from gspo.model.packing import TokenSequence
from gspo.model.policy import response_likelihood
from gspo.types import Batch, Experts


def compute_old_logprobs(batch: Batch, learner: Learner) -> Batch:
    """The batch with π_old of the samples that are trained on: as the engine had it, or the policy itself (§5.4).

    The policy's own is not computed for the first mini-batch, whose forward pass in the update is π_old's. Routers
    that are to replay the policy's experts need its pass even where the engine's log-likelihoods are taken.
    """
    actor = learner.actor
    of_engine = actor.old_logprobs == "engine"
    if of_engine:
        samples = trained_samples(batch.groups, actor)
        batch = batch.with_changed(
            {sample: replace(sample, old_logprobs=sample.sampler_logprobs) for sample in samples}
        )
    if of_engine and actor.routing_replay != "policy":
        return batch

    def own(sequences: Sequence[TokenSequence]) -> Iterator[tuple[Float[Tensor, "_"], Experts | None]]:
        likelihood = response_likelihood(learner.policy, sequences, temperature=learner.temperature)
        experts = likelihood.experts or [None] * len(sequences)
        return zip(split_tokens(likelihood.logprobs, sequences), experts, strict=True)

    changed = {}
    for groups in mini_batches(batch, actor.mini_batches)[1:]:
        samples = trained_samples(groups, actor)
        passes = for_each_sample(own, learner.policy, samples, actor, learner.check_stop)
        for sample, (logprobs, experts) in zip(samples, passes, strict=True):
            old_logprobs = sample.old_logprobs if of_engine else logprobs
            changed[sample] = replace(sample, old_logprobs=old_logprobs, old_experts=experts)
    return batch.with_changed(changed)
