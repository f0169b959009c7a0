"""How a rollout batch is cut: what of it trains, into mini-batches, and these into micro-batches."""

from collections.abc import Sequence

from gspo.model.packing import TokenSequence, micro_batches
from gspo.model.policy import Policy
from gspo.recipe.schema import ActorConfig
from gspo.types import Batch, Rollout


def trainable_items(batch: Batch, actor: ActorConfig) -> list[tuple[int, TokenSequence]]:
    """The rollouts (index, sequence) that carry a gradient: the others cost no forward or backward pass.

    Without an advantage there is none, unless every sequence trains something: a KL or entropy term, a value model.
    """
    replays = actor.routing_replay == "engine"
    sequences = [
        TokenSequence(
            prompt_ids=group.query.prompt_ids,
            response_ids=rollout.response_ids,
            experts=rollout.experts if replays else None,
        )
        for group in batch.groups
        for rollout in group.rollouts
    ]
    return [(index, sequences[index]) for index in range(len(sequences)) if _trains(batch, index, actor)]


def takes_part(batch: Batch, index: int) -> bool:
    """Whether a rollout counts in the loss's denominator: it is scored, and not masked."""
    return batch.scores[index].reward is not None and index not in batch.masked


def rollouts_of(batch: Batch) -> list[Rollout]:
    """All of a batch, group after group."""
    return [rollout for group in batch.groups for rollout in group.rollouts]


def cut(policy: Policy, sequences: Sequence[TokenSequence], actor: ActorConfig) -> list[list[int]]:
    """Indices of the micro-batches; where the gradient's noise is measured, none crosses the `middle`."""
    halves = [sequences]
    if actor.gradient_noise and (half := middle(sequences)):
        halves = [sequences[:half], sequences[half:]]
    parts, first = [], 0
    for half_of in halves:
        found = micro_batches(half_of, actor.micro_batch_tokens, hidden_size=policy.shared_hidden_size)
        parts += [[first + index for index in part] for part in found]
        first += len(half_of)
    return parts


def middle(sequences: Sequence[TokenSequence]) -> int:
    """The first sequence of the second half, which begins with a group; 0 where there is only one group."""
    starts = [
        index for index in range(1, len(sequences)) if sequences[index].prompt_ids != sequences[index - 1].prompt_ids
    ]
    return min(starts, key=lambda index: abs(2 * index - len(sequences)), default=0)


def mini_batches(batch: Batch, parts: int) -> list[list[int]]:
    """Rollout indices of each mini-batch: whole groups in the order of the batch."""
    per_part = len(batch.groups) // parts
    indices = iter(range(len(batch.scores)))
    groups = [[next(indices) for _ in group.rollouts] for group in batch.groups]
    return [
        [index for group in groups[start : start + per_part] for index in group]
        for start in range(0, per_part * parts, per_part)
    ]


def _trains(batch: Batch, index: int, actor: ActorConfig) -> bool:
    by_token = batch.token_advantages.get(index)
    has_advantage = batch.advantages[index] != 0 if by_token is None else bool((by_token != 0).any())
    return has_advantage or (actor.every_sequence_trains and takes_part(batch, index))
