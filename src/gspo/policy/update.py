"""The update: a rollout batch cut into mini-batches, one optimiser step each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.config import Actor
from gspo.objective import Surrogate, surrogate
from gspo.policy.likelihood import response_likelihood
from gspo.policy.model import Policy
from gspo.policy.optimizer import Optimizer, StepReport
from gspo.policy.packing import Conditioned, micro_batches
from gspo.records import Batch


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One sequence of the update."""

    index: int  # of the rollout in the batch
    sequence: Conditioned
    advantage: float
    old_logprobs: Float[Tensor, "T"] | None  # None: the policy is π_old, its own forward pass gives them


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What the update saw of one sequence, in the mini-batch that trained it."""

    index: int
    mini_batch: int
    num_tokens: int
    num_clipped: int
    sequence_ratio: float
    entropy_sum: float
    old_logprobs: Float[Tensor, "T"]  # on the CPU


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


def old_logprobs(policy: Policy, batch: Batch, actor: Actor, *, temperature: float) -> dict[int, Float[Tensor, "T"]]:
    """log π_old of the trainable rollouts' tokens, by rollout index: the engine's, or the policy's own (§5.4).

    The policy's own are not computed for the first mini-batch, whose forward pass in the update is π_old's.
    """
    sequences = dict(trainable_items(batch))
    if actor.old_logprobs == "engine":
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        return {index: rollouts[index].sampler_logprobs for index in sequences}
    found: dict[int, Tensor] = {}
    for members in _mini_batches(batch, actor.mini_batches)[1:]:
        # Cut as the update cuts: other shapes round differently, in bfloat16 by as much as GSPO's clip range.
        indices = [index for index in members if index in sequences]
        for part in _cut(policy, [sequences[index] for index in indices], actor):
            chosen = [indices[i] for i in part]
            with torch.no_grad():
                likelihood = response_likelihood(policy, [sequences[i] for i in chosen], temperature=temperature)
            lengths = [len(sequences[index].response_ids) for index in chosen]
            found |= dict(zip(chosen, likelihood.logprobs.cpu().split(lengths), strict=True))
    return found


def update(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    old: Mapping[int, Float[Tensor, "T"]],
    actor: Actor,
    *,
    temperature: float,
    num_done: int = 0,
    may_stop: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[MiniBatchReport]:
    """One optimiser step for each of the actor's mini-batches after `num_done`; groups stay whole within one.

    The loss is −Σ_i per_sequence_i / (scored sequences of the mini-batch), whatever the cut into micro-batches.
    Within `may_stop` nothing but gradients changes: there, a mini-batch may be broken off and begun again.
    """
    sequences = dict(trainable_items(batch))
    for number, members in enumerate(_mini_batches(batch, actor.mini_batches)):
        if number < num_done:
            continue
        chosen = [
            Item(
                index=index,
                sequence=sequences[index],
                advantage=batch.advantages[index],
                old_logprobs=old.get(index) if number == 0 else old[index],  # only there can the policy be π_old
            )
            for index in members
            if index in sequences
        ]
        num_sequences = sum(batch.scores[index].reward is not None for index in members)
        with may_stop():
            trained, loss = accumulate_gradient(policy, chosen, actor, num_sequences, number, temperature=temperature)
        step = optimizer.step(loss_is_finite=math.isfinite(loss))
        yield MiniBatchReport(loss=loss, step=step, trained=tuple(trained))


def accumulate_gradient(
    policy: Policy, items: Sequence[Item], actor: Actor, num_sequences: int, mini_batch: int, *, temperature: float
) -> tuple[list[Trained], float]:
    """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch; returns what was seen and the loss.

    `num_sequences` is the denominator over all micro-batches (and ranks), handed in so that no cut can change it.
    """
    trained: list[Trained] = []
    loss = 0.0
    for part in _cut(policy, [item.sequence for item in items], actor):
        chosen = [items[i] for i in part]
        likelihood = response_likelihood(policy, [item.sequence for item in chosen], temperature=temperature)
        old = _old(chosen, likelihood.logprobs)
        result = _surrogate(chosen, likelihood.logprobs, old, actor)
        part_loss = -result.per_sequence.sum() / num_sequences
        if not result.clipped.all():  # where everything is clipped there is no gradient to compute
            part_loss.backward()
        loss += part_loss.item()
        trained += _observed(chosen, result, likelihood.entropy, old, mini_batch)
    return trained, loss


def _cut(policy: Policy, sequences: Sequence[Conditioned], actor: Actor) -> list[list[int]]:
    return micro_batches(sequences, actor.micro_batch_tokens, hidden_size=policy.shared_hidden_size)


def _old(items: Sequence[Item], logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    pieces = logprobs.detach().split([len(item.sequence.response_ids) for item in items])
    return torch.cat(
        [
            piece if item.old_logprobs is None else item.old_logprobs.to(piece.device)
            for item, piece in zip(items, pieces, strict=True)
        ]
    )


def _surrogate(items: Sequence[Item], logprobs: Float[Tensor, "N"], old: Float[Tensor, "N"], actor: Actor) -> Surrogate:
    device = logprobs.device
    return surrogate(
        logprobs,
        old,
        torch.tensor([item.advantage for item in items], dtype=torch.float32, device=device),
        torch.tensor([len(item.sequence.response_ids) for item in items], device=device),
        level=actor.importance_sampling_level,
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
    )


def _observed(
    items: Sequence[Item],
    result: Surrogate,
    entropy: Float[Tensor, "N"],
    old: Float[Tensor, "N"],
    mini_batch: int,
) -> list[Trained]:
    lengths = [len(item.sequence.response_ids) for item in items]
    tensors = (result.clipped.cpu(), entropy.cpu(), old.cpu())
    return [
        Trained(
            index=item.index,
            mini_batch=mini_batch,
            num_tokens=len(token_entropy),
            num_clipped=int(clipped.sum()),
            sequence_ratio=ratio,
            entropy_sum=float(token_entropy.sum()),
            old_logprobs=token_old,
        )
        for item, ratio, clipped, token_entropy, token_old in zip(
            items, result.sequence_ratio.tolist(), *(tensor.split(lengths) for tensor in tensors), strict=True
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
