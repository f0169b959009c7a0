"""How a batch is split: into mini-batches, of an optimiser step each, and these into micro-batches, of a pass each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.learner.balance import attention_share, cost, shares
from gspo.learner.critic import Critic
from gspo.learner.optimizer import Optimizer
from gspo.learner.ranks import gathered, highest, num_ranks, rank
from gspo.model import packing
from gspo.model.packing import EMPTY, TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import ActorConfig
from gspo.types import Batch, Group, Sample

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Learner:
    """The policy and all that a run trains it with.

    Example: Learner(policy=policy, optimizer=Optimizer(policy.model, …), actor=recipe.actor, temperature=1.0)
    """

    policy: Policy
    optimizer: Optimizer
    actor: ActorConfig
    temperature: float  # of the distribution that the samples were drawn from
    max_tokens: int = 1  # of any response: what length_norm: constant divides by
    critic: Critic | None = None
    # Called before each pass, on all ranks, where nothing but gradients has changed since the last step; it may raise.
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
        starts=sample.starts,
    )


def micro_batches(learner: Learner, samples: Sequence[Sample]) -> Iterator[tuple[list[int], bool]]:
    """The places of the samples of each of this rank's passes, in order, and whether they are of the second half.

    Together the ranks have all samples. Halves are cut at `split_point` where the gradient's noise is measured. In each
    of them every rank has as many passes as the others: empty ones follow its own.
    """
    for is_second, half in enumerate(_halves(learner, samples)):
        places = places_of_ranks(learner, samples, half, num_ranks())[rank()]
        sequences = [token_sequence(samples[place], learner.actor) for place in places]
        width = learner.policy.shared_hidden_size
        cuts = packing.micro_batches(sequences, learner.actor.micro_batch_tokens, hidden_size=width)
        for number in range(highest(len(cuts))):
            yield [places[index] for index in cuts[number]] if number < len(cuts) else [], bool(is_second)


def places_of_ranks(learner: Learner, samples: Sequence[Sample], places: Sequence[int], number: int) -> list[list[int]]:
    """The places in the samples that each of a number of ranks computes: all have about as much to do."""
    if number == 1:
        return [[*places]]
    costs = _costs(learner, [samples[place] for place in places])
    return [[places[index] for index in indices] for indices in shares(costs, number)]


def slowest_over_mean(learner: Learner, samples: Sequence[Sample]) -> float:
    """Return the cost of the rank with the most to compute of the samples, over the mean of all ranks."""
    if num_ranks() == 1:
        return 1.0
    costs, slowest = [cost for group in _costs(learner, samples) for cost in group], 0.0
    for half in _halves(learner, samples):  # no rank begins the second before all have ended the first
        dealt = places_of_ranks(learner, samples, half, num_ranks())
        slowest += max(sum(costs[place] for place in places) for places in dealt)
    return slowest * num_ranks() / sum(costs)


def _halves(learner: Learner, samples: Sequence[Sample]) -> tuple[range, range]:
    split = split_point(samples) if learner.actor.gradient_noise else 0
    return range(split), range(split, len(samples))


def _costs(learner: Learner, samples: Sequence[Sample]) -> list[list[float]]:
    """The costs of the samples, group by group."""
    share = attention_share(learner.policy.model.config.get_text_config())
    groups = groupby(samples, key=lambda sample: sample.query.prompt_ids)
    return [[cost(sample.num_tokens + len(sample.query.prompt_ids), share) for sample in group] for _, group in groups]


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
    computed: list[tuple[int, T]] = []
    for places, _ in micro_batches(learner, samples):
        learner.check_stop()
        results = compute([token_sequence(samples[place], learner.actor) for place in places] or [EMPTY])
        computed += zip(places, results, strict=False)  # of an empty pass none
    results_of = dict(pair for pairs in gathered(computed) for pair in pairs)
    return [results_of[place] for place in range(len(samples)) if place in results_of]


def split_tokens(values: Float[Tensor, "N"], sequences: Sequence[TokenSequence]) -> list[Float[Tensor, "_"]]:
    """Return each sequence's own of the packed values, as copies on the CPU."""
    return [piece.clone() for piece in values.cpu().split([len(sequence.scored_ids) for sequence in sequences])]
