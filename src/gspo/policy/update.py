"""The update: a rollout batch cut into mini-batches, one optimiser step each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.config import Actor
from gspo.objective import Surrogate, balance_loss, surrogate
from gspo.policy.likelihood import Likelihood, response_likelihood
from gspo.policy.model import Policy
from gspo.policy.old_policy import Old, cut, mini_batches, rollouts_of, trainable_items
from gspo.policy.optimizer import Optimizer, StepReport
from gspo.policy.packing import Conditioned
from gspo.policy.volatility import Activation, VolatilitySample, activation
from gspo.records import Batch, Experts


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One sequence of the update."""

    index: int  # of the rollout in the batch
    sequence: Conditioned
    advantage: float
    old_logprobs: Float[Tensor, "T"] | None  # None: the policy is π_old, its own forward pass gives them
    old_experts: Experts | None = None  # what the routers' choice is compared with; None: with nothing


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

    loss: float  # the surrogate's part
    step: StepReport
    trained: tuple[Trained, ...]
    balance_loss: float = 0.0  # of the routers, mean over the trained sequences; 0 where it is no part of the loss
    # Of a model with routers: before the step, compared with π_old's, in the first mini-batch with the engine's.
    activation: Activation | None = None
    after: Activation | None = None  # of a sample, after the step, where no mini-batch follows that would show it


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """What was seen of a mini-batch while its gradient was added up."""

    trained: tuple[Trained, ...]
    loss: float
    balance_loss: float
    activation: Activation | None


def update(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    old: Mapping[int, Old],
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
    items = _items(batch, old, actor)
    for number, members in enumerate(mini_batches(batch, actor.mini_batches)):
        if number < num_done:
            continue
        chosen = [items[index] for index in members if index in items]
        num_sequences = sum(batch.scores[index].reward is not None for index in members)
        with may_stop():
            sequences = [item.sequence for item in chosen]
            # Where mini-batches follow, their own forward passes show what the step has changed.
            sample = VolatilitySample(policy, sequences, actor) if actor.mini_batches == 1 else None
            seen = accumulate_gradient(policy, chosen, actor, num_sequences, number, temperature=temperature)
        step = optimizer.step(loss_is_finite=math.isfinite(seen.loss))
        after = None if sample is None else sample.change()
        yield MiniBatchReport(step=step, after=after, **vars(seen))


def _items(batch: Batch, old: Mapping[int, Old], actor: Actor) -> dict[int, Item]:
    """The trainable rollouts by index, with what is known of π_old and with the experts they replay."""
    sequences, rollouts = dict(trainable_items(batch, actor)), rollouts_of(batch)
    first = set(mini_batches(batch, actor.mini_batches)[0])
    found = {}
    for index, sequence in sequences.items():
        # Only in the first mini-batch can the policy still be π_old, and its routers' choice π_old's.
        known = old.get(index) if index in first else old[index]
        if actor.routing_replay == "policy" and known is not None and index not in first:
            sequence = replace(sequence, experts=known.experts)
        found[index] = Item(
            index=index,
            sequence=sequence,
            advantage=batch.advantages[index],
            old_logprobs=None if known is None else known.logprobs,
            old_experts=rollouts[index].experts if known is None else known.experts,
        )
    return found


def accumulate_gradient(
    policy: Policy, items: Sequence[Item], actor: Actor, num_sequences: int, mini_batch: int, *, temperature: float
) -> Accumulated:
    """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch.

    `num_sequences` is the denominator over all micro-batches (and ranks), handed in so that no cut can change it.
    """
    trained: list[Trained] = []
    loss = balance = 0.0
    seen: Activation | None = None
    for part in cut(policy, [item.sequence for item in items], actor):
        chosen = [items[i] for i in part]
        likelihood = response_likelihood(
            policy,
            [item.sequence for item in chosen],
            temperature=temperature,
            keep_router_logits=actor.router_aux_loss > 0,
        )
        old = _old(chosen, likelihood.logprobs)
        result = _surrogate(chosen, likelihood.logprobs, old, actor)
        part_loss = -result.per_sequence.sum() / num_sequences
        if result.clipped.all():  # there is no gradient to compute, and that of an infinite ratio would be NaN
            part_loss = part_loss.detach()
        loss += part_loss.item()
        if likelihood.router_logits:
            unbalanced = _balance_loss(chosen, likelihood)
            part_loss = part_loss + actor.router_aux_loss * unbalanced / num_sequences
            balance += unbalanced.item() / len(items)
        if part_loss.requires_grad:
            part_loss.backward()
        trained += _observed(chosen, result, likelihood.entropy, old, mini_batch)
        if policy.routing is not None and likelihood.experts is not None:
            counts = activation(likelihood.experts, [item.old_experts for item in chosen], policy.routing.num_experts)
            seen = counts if seen is None else seen + counts
    return Accumulated(trained=tuple(trained), loss=loss, balance_loss=balance, activation=seen)


def _balance_loss(items: Sequence[Item], likelihood: Likelihood) -> Float[Tensor, ""]:
    """Summed over the sequences, by the experts that were used, replayed ones too."""
    assert likelihood.experts is not None
    used = [item.sequence.experts or own for item, own in zip(items, likelihood.experts, strict=True)]
    device = likelihood.logprobs.device
    rows = torch.cat([experts.row for experts in used]).long().to(device)
    lengths = torch.tensor([len(item.sequence.response_ids) for item in items], device=device)
    return balance_loss(likelihood.router_logits, rows, lengths).sum()


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
