"""What models other than the policy say of the samples: the reference's likelihoods, the critic's values."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from gspo.learner.micro_batching import for_each_sample, split_tokens
from gspo.learner.update import Learner
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood, response_states
from gspo.types import Batch


def score_with_reference_and_critic(batch: Batch, learner: Learner, reference: Policy | None) -> Batch:
    """The batch with reference log-likelihoods and values of every scored sample, where the recipe has such models."""
    policy, critic = learner.policy, learner.critic
    samples = [sample for sample in batch.samples if sample.reward is not None]

    def per_sample(score_fn: Callable[[Sequence[TokenSequence]], Float[Tensor, "N"]]) -> list[Float[Tensor, "_"]]:
        return for_each_sample(
            lambda part: split_tokens(score_fn(part), part), policy, samples, learner.actor, learner.check_stop
        )

    def logprobs(sequences: Sequence[TokenSequence]) -> Float[Tensor, "N"]:
        assert reference is not None
        free = [replace(sequence, experts=None) for sequence in sequences]  # its routers choose for themselves
        return response_likelihood(reference, free, temperature=learner.temperature).logprobs

    def values(sequences: Sequence[TokenSequence]) -> Float[Tensor, "N"]:
        assert critic is not None
        return critic.values(sequences, response_states(policy, sequences) if critic.needs_policy() else None)

    nothing = [None] * len(samples)
    columns = (
        nothing if reference is None else per_sample(logprobs),
        nothing if critic is None else per_sample(values),
    )
    rows = zip(samples, *columns, strict=True)
    return batch.with_changed({sample: replace(sample, reference_logprobs=r, values=v) for sample, r, v in rows})
