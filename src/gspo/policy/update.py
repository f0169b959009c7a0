"""The update: a rollout batch cut into mini-batches, one optimiser step each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gspo.config import Actor
from gspo.objective import Surrogate, surrogate
from gspo.policy.likelihood import Conditioned, micro_batches, response_likelihood
from gspo.policy.model import Policy
from gspo.policy.optimizer import Optimizer, StepReport
from gspo.records import Batch


@dataclass(frozen=True, kw_only=True)
class Item:
    """One sequence of the update."""

    index: int  # of the rollout in the batch
    sequence: Conditioned
    advantage: float
    old_logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the update saw of one sequence, in the mini-batch that trained it."""

    index: int
    mini_batch: int
    num_tokens: int
    num_clipped: int
    sequence_ratio: float
    entropy_sum: float


@dataclass(frozen=True, kw_only=True)
class MiniBatchReport:
    """One optimiser step: its loss and what became of it."""

    loss: float
    step: StepReport
    trained: tuple[Trained, ...]


def trainable_items(batch: Batch) -> list[tuple[int, Conditioned]]:
    """The rollouts (index, sequence) that carry a gradient: a zero advantage costs no forward or backward pass."""
    sequences = [
        Conditioned(prompt_ids=group.query.prompt_ids, response_ids=rollout.response_ids)
        for group in batch.groups
        for rollout in group.rollouts
    ]
    return [(index, sequences[index]) for index, advantage in enumerate(batch.advantages) if advantage != 0]


def old_logprobs(policy: Policy, batch: Batch, actor: Actor, *, temperature: float) -> dict[int, tuple[float, ...]]:
    """log π_old of the trainable rollouts' tokens, by rollout index: the policy's own, or the engine's (§5.4)."""
    items = trainable_items(batch)
    if actor.old_logprobs == "engine":
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        return {index: rollouts[index].sampler_logprobs for index, _ in items}
    found: dict[int, tuple[float, ...]] = {}
    sequences = dict(items)
    for members in _mini_batches(batch, actor.mini_batches):
        # Cut as the update cuts: other shapes round differently, in bfloat16 by as much as GSPO's clip range.
        indices = [index for index in members if index in sequences]
        for part in micro_batches([sequences[index].num_tokens for index in indices], actor.micro_batch_tokens):
            chosen = [indices[i] for i in part]
            found |= _policy_logprobs(policy, {index: sequences[index] for index in chosen}, actor, temperature)
    return found


@torch.no_grad()
def _policy_logprobs(
    policy: Policy, sequences: dict[int, Conditioned], actor: Actor, temperature: float
) -> dict[int, tuple[float, ...]]:
    likelihood = response_likelihood(
        policy, list(sequences.values()), temperature=temperature, chunk_tokens=actor.logprob_chunk_tokens
    )
    pieces = likelihood.logprobs.split([len(sequence.response_ids) for sequence in sequences.values()])
    return {index: tuple(piece.tolist()) for index, piece in zip(sequences, pieces, strict=True)}


def update(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    old: dict[int, tuple[float, ...]],
    actor: Actor,
    *,
    temperature: float,
) -> list[MiniBatchReport]:
    """One optimiser step for each of the actor's mini-batches; groups stay whole within a mini-batch.

    The loss is −Σ_i per_sequence_i / (scored sequences of the mini-batch), whatever the cut into micro-batches.
    """
    items = {
        index: Item(index=index, sequence=sequence, advantage=batch.advantages[index], old_logprobs=old[index])
        for index, sequence in trainable_items(batch)
    }
    reports = []
    for number, members in enumerate(_mini_batches(batch, actor.mini_batches)):
        chosen = [items[index] for index in members if index in items]
        num_sequences = sum(batch.scores[index].reward is not None for index in members)
        trained, loss = accumulate_gradient(policy, chosen, actor, num_sequences, number, temperature=temperature)
        step = optimizer.step(loss_is_finite=math.isfinite(loss))
        reports.append(MiniBatchReport(loss=loss, step=step, trained=tuple(trained)))
    return reports


def accumulate_gradient(
    policy: Policy, items: Sequence[Item], actor: Actor, num_sequences: int, mini_batch: int, *, temperature: float
) -> tuple[list[Trained], float]:
    """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch; returns what was seen and the loss.

    `num_sequences` is the denominator over all micro-batches (and ranks), handed in so that no cut can change it.
    """
    trained: list[Trained] = []
    loss = 0.0
    for part in micro_batches([item.sequence.num_tokens for item in items], actor.micro_batch_tokens):
        chosen = [items[i] for i in part]
        likelihood = response_likelihood(
            policy,
            [item.sequence for item in chosen],
            temperature=temperature,
            chunk_tokens=actor.logprob_chunk_tokens,
        )
        result = _surrogate(policy, chosen, likelihood.logprobs, actor)
        part_loss = -result.per_sequence.sum() / num_sequences
        part_loss.backward()
        loss += part_loss.item()
        trained += _observed(chosen, result, likelihood.entropy, mini_batch)
    return trained, loss


def _surrogate(policy: Policy, items: Sequence[Item], logprobs: torch.Tensor, actor: Actor) -> Surrogate:
    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=policy.device)

    return surrogate(
        logprobs,
        tensor([value for item in items for value in item.old_logprobs]),
        tensor([item.advantage for item in items]),
        torch.tensor([len(item.sequence.response_ids) for item in items], device=policy.device),
        level=actor.importance_sampling_level,
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
    )


def _observed(items: Sequence[Item], result: Surrogate, entropy: torch.Tensor, mini_batch: int) -> list[Trained]:
    lengths = [len(item.sequence.response_ids) for item in items]
    return [
        Trained(
            index=item.index,
            mini_batch=mini_batch,
            num_tokens=length,
            num_clipped=int(clipped.sum()),
            sequence_ratio=ratio,
            entropy_sum=float(token_entropy.sum()),
        )
        for item, length, clipped, ratio, token_entropy in zip(
            items,
            lengths,
            result.clipped.cpu().split(lengths),
            result.sequence_ratio.tolist(),
            entropy.cpu().split(lengths),
            strict=True,
        )
    ]


def _mini_batches(batch: Batch, parts: int) -> list[list[int]]:
    """Rollout indices of each mini-batch: whole groups in the order of the batch."""
    per_part = len(batch.groups) // parts
    indices = iter(range(len(batch.scores)))
    groups = [[next(indices) for _ in group.rollouts] for group in batch.groups]
    return [
        [index for group in groups[start : start + per_part] for index in group]
        for start in range(0, per_part * parts, per_part)
    ]
