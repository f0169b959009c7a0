"""The update: a rollout batch cut into mini-batches, one optimiser step each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from gspo.learner.critic import Critic
from gspo.learner.cutting import cut, middle, mini_batches
from gspo.learner.item import Item, Trained, items_of, trained_of
from gspo.learner.loss import Denominators, Loss, denominators_of, micro_batch_loss
from gspo.learner.noise import Noise
from gspo.learner.old_policy import Old
from gspo.learner.optimizer import Optimizer, StepReport
from gspo.learner.volatility import Activation, VolatilitySample
from gspo.model.policy import Policy
from gspo.recipe.schema import ActorConfig
from gspo.types import Batch


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """What was seen of a mini-batch while its gradient was added up."""

    trained: tuple[Trained, ...] = ()
    loss: float = 0.0  # the surrogate's part
    balance_loss: float = 0.0  # of the routers, mean over the trained sequences; 0 where it is no part of the loss
    kl: float = 0.0  # of the policy from the reference, estimated; 0 where it is no part of the loss
    value_loss: float = 0.0
    # Of a model with routers: before the step, compared with π_old's, in the first mini-batch with the engine's.
    activation: Activation | None = None
    noise: Noise | None = None  # of the gradient; None: not measured, or of a single group


@dataclass(frozen=True, kw_only=True)
class MiniBatchReport(Accumulated):
    """One optimiser step: its loss and what became of it."""

    step: StepReport
    critic_step: StepReport | None = None
    clip_range: tuple[float, float] = (0.0, 0.0)  # clip_low and clip_high in force
    after: Activation | None = None  # of a sample, after the step, where no mini-batch follows that would show it


def update(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    old: Mapping[int, Old],
    actor: ActorConfig,
    *,
    temperature: float,
    max_tokens: int = 1,
    critic: Critic | None = None,
    num_done: int = 0,
    check_stop: Callable[[], None] = lambda: None,
) -> Iterator[MiniBatchReport]:
    """One optimiser step for each of the actor's mini-batches after `num_done`; groups stay whole within one.

    The loss is −Σ_i per_sequence_i / (sequences of the mini-batch that take part), whatever the cut into
    micro-batches. `max_tokens` is what length_norm: constant divides by. `check_stop` may
    raise: it is called where nothing but gradients has changed since the last step.
    """
    items = items_of(batch, old, actor)
    for number, members in enumerate(mini_batches(batch, actor.mini_batches)):
        if number < num_done:
            continue
        chosen = [items[index] for index in members if index in items]
        denominators = denominators_of(batch, members, max_tokens)
        # Where mini-batches follow, their own forward passes show what the step has changed.
        sequences = [item.sequence for item in chosen] if actor.mini_batches == 1 else []
        sample = VolatilitySample(policy, sequences, actor)
        seen = accumulate_gradient(
            policy,
            chosen,
            actor,
            denominators,
            number,
            temperature=temperature,
            critic=critic,
            optimizer=optimizer if actor.gradient_noise else None,
            check_stop=check_stop,
        )
        finite = math.isfinite(seen.loss) and math.isfinite(seen.value_loss)
        step = optimizer.step(loss_is_finite=finite)
        critic_step = None if critic is None else critic.optimizer.step(loss_is_finite=finite and step.applied)
        clip_range = (actor.clip_low, actor.clip_high)
        yield MiniBatchReport(
            step=step, critic_step=critic_step, clip_range=clip_range, after=sample.change(), **vars(seen)
        )


def accumulate_gradient(
    policy: Policy,
    items: Sequence[Item],
    actor: ActorConfig,
    denominators: Denominators,
    mini_batch: int,
    *,
    temperature: float,
    critic: Critic | None = None,
    optimizer: Optimizer | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> Accumulated:
    """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch; the optimizer measures its noise."""
    losses, half = [], None
    sequences = [item.sequence for item in items]
    boundary = middle(sequences)
    for part in cut(policy, sequences, actor):
        check_stop()
        if optimizer is not None and part[0] == boundary > 0:
            half = optimizer.gradient()
        chosen = [items[index] for index in part]
        loss = micro_batch_loss(policy, critic, chosen, actor, denominators, temperature=temperature)
        if loss.total.requires_grad:
            loss.total.backward()
        losses.append(loss)
    activations = [loss.activation for loss in losses if loss.activation is not None]
    terms = _summed_terms(losses)
    if "balance_loss" in terms:
        terms["balance_loss"] *= denominators.num_sequences / len(items)
    return Accumulated(
        **terms,
        trained=trained_of([loss.observation for loss in losses], mini_batch),
        activation=sum(activations[1:], activations[0]) if activations else None,
        noise=None if half is None or optimizer is None else optimizer.noise(half, boundary / len(items)),
    )


def _summed_terms(losses: Sequence[Loss]) -> dict[str, float]:
    """Over the micro-batches, all read from the device in one go."""
    if not losses:
        return {}
    rows = torch.stack([torch.stack(list(loss.terms.values())) for loss in losses]).tolist()
    return {name: sum(values) for name, values in zip(losses[0].terms, zip(*rows, strict=True), strict=True)}
