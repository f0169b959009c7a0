"""How a batch is split: into mini-batches, of an optimiser step each, and these into micro-batches, of a pass each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.learner.critic import Critic
from gspo.learner.optimizer import Optimizer
from gspo.model import packing
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import ActorConfig
from gspo.types import Batch, Group, Sample

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Learner:
    """What a run trains with, and how.

    Example: Learner(policy=policy, optimizer=Optimizer(policy.model, …), actor=recipe.actor, temperature=1.0)
    """

    policy: Policy
    optimizer: Optimizer
    actor: ActorConfig
    temperature: float  # of the distribution that the samples were drawn from
    max_tokens: int = 1  # of any response: what length_norm: constant divides by
    critic: Critic | None = None
    # Called before each forward pass, where nothing but gradients has changed since the last step; it may raise.
    check_stop: Callable[[], None] = lambda: None


def mini_batches(batch: Batch, number: int) -> list[tuple[Group, ...]]:
    """The groups of each mini-batch: whole, in the order of the batch."""
    size = len(batch.groups) // number
    return [batch.groups[start : start + size] for start in range(0, size * number, size)]


def trained_samples(groups: Sequence[Group], actor: ActorConfig) -> list[Sample]:
    """The samples that carry a gradient: the others cost no forward or backward pass.

    Without an advantage there is none, unless every sequence trains something: a KL or entropy term, a value model.
    """
    samples = [sample for group in groups for sample in group.samples]
    return [sample for sample in samples if sample.has_advantage or (actor.every_sequence_trains and sample.takes_part)]


def token_sequence(sample: Sample, actor: ActorConfig) -> TokenSequence:
    """The sample as the policy reads it, with the experts that its routers are to use again."""
    replayed = {"none": None, "policy": sample.old_experts, "engine": sample.experts}
    return TokenSequence(
        prompt_ids=sample.query.prompt_ids,
        response_ids=sample.token_ids,
        loss_mask=None if sample.num_written == sample.num_tokens else sample.loss_mask,
        experts=replayed[actor.routing_replay],
    )


def micro_batches(policy: Policy, samples: Sequence[Sample], actor: ActorConfig) -> list[list[Sample]]:
    """The samples of each pass, in their order; where the gradient's noise is measured, none crosses `split_point`."""
    split = split_point(samples) if actor.gradient_noise else 0
    parts = []
    for half in (samples[:split], samples[split:]):
        sequences = [token_sequence(sample, actor) for sample in half]
        cuts = packing.micro_batches(sequences, actor.micro_batch_tokens, hidden_size=policy.shared_hidden_size)
        parts += [[half[index] for index in indices] for indices in cuts]
    return parts


def split_point(samples: Sequence[Sample]) -> int:
    """The first sample of the second half, which starts with a group; 0 where there is only one group."""
    prompts = [sample.query.prompt_ids for sample in samples]
    starts = [index for index in range(1, len(prompts)) if prompts[index] != prompts[index - 1]]
    return min(starts, key=lambda index: abs(2 * index - len(samples)), default=0)


@torch.no_grad()
def for_each_sample(
    learner: Learner, samples: Sequence[Sample], compute: Callable[[Sequence[TokenSequence]], Iterable[T]]
) -> list[T]:
    """The result of `compute` for each sample, in their order, without gradients.

    The passes are cut as the update cuts its own: other shapes round differently, in bfloat16 by as much as GSPO's
    clip range.
    """
    results: list[T] = []
    for part in micro_batches(learner.policy, samples, learner.actor):
        learner.check_stop()
        results += compute([token_sequence(sample, learner.actor) for sample in part])
    return results


def split_tokens(values: Float[Tensor, "N"], sequences: Sequence[TokenSequence]) -> list[Float[Tensor, "_"]]:
    """Each sequence's own of the packed values, as copies on the CPU."""
    return [piece.clone() for piece in values.cpu().split([len(sequence.scored_ids) for sequence in sequences])]
