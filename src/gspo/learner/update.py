"""The update: a batch split into mini-batches, one optimiser step each."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gspo.learner.critic import Critic
from gspo.learner.loss import Denominators, Loss, denominators_of, micro_batch_loss
from gspo.learner.micro_batching import micro_batches, mini_batches, split_point, trained_samples
from gspo.learner.optimizer import Noise, Optimizer, StepReport
from gspo.learner.sequence_stats import sequence_stats
from gspo.learner.volatility import Activation, VolatilitySample
from gspo.model.policy import Policy
from gspo.recipe.sections import ActorConfig
from gspo.types import Batch, Sample, SequenceStats


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


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """What was seen of a mini-batch while its gradient was added up."""

    num_trained: int = 0  # sequences
    loss: float = 0.0  # the surrogate's part
    balance_loss: float = 0.0  # of the routers, mean over the trained sequences; 0 where it is no part of the loss
    kl: float = 0.0  # of the policy from the reference, estimated; 0 where it is no part of the loss
    value_loss: float = 0.0
    # Of a model with routers: before the step, compared with π_old's, in the first mini-batch with the engine's.
    activation: Activation | None = None
    noise: Noise | None = None  # of the gradient; None: not measured, or of a single group


@dataclass(frozen=True, kw_only=True)
class MiniBatchReport(GradientReport):
    """One optimiser step: its loss and what became of it."""

    step: StepReport
    critic_step: StepReport | None = None
    clip_range: tuple[float, float] = (0.0, 0.0)  # clip_low and clip_high in force
    after: Activation | None = None  # of a few samples, after the step, where no mini-batch follows that would show it


def update(
    learner: Learner,
    batch: Batch,
    *,
    num_done: int = 0,
) -> Iterator[tuple[MiniBatchReport, Batch]]:
    """One optimiser step for each of the actor's mini-batches after `num_done`; groups stay whole within one.

    After each step it yields its report and the batch, in which the samples trained so far have their `stats`. The
    loss is −Σ_i per_sequence_i / (sequences of the mini-batch that take part), whatever the cut into micro-batches.
    """
    policy, optimizer, critic, actor = learner.policy, learner.optimizer, learner.critic, learner.actor
    for number, groups in enumerate(mini_batches(batch, actor.mini_batches)):
        if number < num_done:
            continue
        samples = trained_samples(groups, actor)
        # Where mini-batches follow, their own forward passes show what the step has changed.
        watched = VolatilitySample(policy, samples if actor.mini_batches == 1 else [], actor)
        gradient, stats = accumulate_gradient(learner, samples, denominators_of(groups, learner.max_tokens), number)
        finite = math.isfinite(gradient.loss) and math.isfinite(gradient.value_loss)
        step = optimizer.step(loss_is_finite=finite)
        critic_step = None if critic is None else critic.optimizer.step(loss_is_finite=finite and step.applied)
        report = MiniBatchReport(
            step=step,
            critic_step=critic_step,
            clip_range=(actor.clip_low, actor.clip_high),
            after=watched.change(),
            **vars(gradient),
        )
        batch = batch.with_changed({sample: replace(sample, stats=seen) for sample, seen in stats.items()})
        yield report, batch


def accumulate_gradient(
    learner: Learner, samples: Sequence[Sample], denominators: Denominators, mini_batch: int
) -> tuple[GradientReport, dict[Sample, SequenceStats]]:
    """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch."""
    policy, actor, losses, half = learner.policy, learner.actor, list[Loss](), None
    split = split_point(samples) if actor.gradient_noise else 0
    for part in micro_batches(policy, samples, actor):
        learner.check_stop()
        if split and part[0] is samples[split]:
            half = learner.optimizer.gradient()
        loss = micro_batch_loss(
            policy, part, actor, denominators, critic=learner.critic, temperature=learner.temperature
        )
        if loss.total.requires_grad:
            loss.total.backward()
        losses.append(loss)
    activations = [loss.activation for loss in losses if loss.activation is not None]
    terms = _summed_terms(losses)
    if "balance_loss" in terms:
        terms["balance_loss"] *= denominators.num_sequences / len(samples)
    report = GradientReport(
        **terms,
        num_trained=len(samples),
        activation=sum(activations[1:], activations[0]) if activations else None,
        noise=None if half is None else learner.optimizer.noise(half, split / len(samples)),
    )
    return report, sequence_stats([loss.observation for loss in losses], mini_batch)


def _summed_terms(losses: Sequence[Loss]) -> dict[str, float]:
    """Over the micro-batches, all read from the device in one go."""
    if not losses:
        return {}
    rows = torch.stack([torch.stack(list(loss.terms.values())) for loss in losses]).tolist()
    return {name: sum(values) for name, values in zip(losses[0].terms, zip(*rows, strict=True), strict=True)}
