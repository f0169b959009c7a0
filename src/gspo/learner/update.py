"""The update: passes over a batch, which is split into mini-batches of one optimiser step each."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gspo.learner.loss import Denominators, Loss, denominators_of, micro_batch_loss, with_stats
from gspo.learner.micro_batching import (
    Learner,
    micro_batches,
    mini_batches,
    slowest_over_mean,
    split_point,
    trained_samples,
)
from gspo.learner.optimizer import Noise, StepReport, gradient_noise
from gspo.learner.ranks import add_up, gathered, num_ranks
from gspo.learner.volatility import Activation, activation, watched_experts
from gspo.model.packing import EMPTY
from gspo.model.policy import response_likelihood
from gspo.recipe.sections import ActorConfig
from gspo.types import Batch, Sample


@dataclass(frozen=True, kw_only=True)
class MiniBatchReport:
    """One optimiser step: what was seen of its mini-batch while the gradient was added up, and what became of it.

    Example: MiniBatchReport(num_trained=8, loss=-0.02, clip_range=(3e-4, 4e-4), step=StepReport(grad_norm=0.7, …))
    """

    num_trained: int = 0  # sequences
    loss: float = 0.0  # the surrogate's part
    balance_loss: float = 0.0  # of the routers, mean over the trained sequences; 0 where it is no part of the loss
    kl: float = 0.0  # of the policy from the reference, estimated; 0 where it is no part of the loss
    observation_loss: float = 0.0  # the cross-entropy of what was said to the policy; 0 where it is no part of the loss
    value_loss: float = 0.0
    # Of a model with routers: before the step, compared with π_old's, in the first mini-batch with the engine's.
    activation: Activation | None = None
    noise: Noise | None = None  # of the gradient; None: not measured, or of a single group
    step: StepReport = field(default_factory=StepReport)
    critic_step: StepReport | None = None
    clip_range: tuple[float, float] = (0.0, 0.0)  # clip_low and clip_high in force
    slowest_over_mean: float = 1.0  # what the rank with the most to compute has, over the mean of all ranks
    measured_slowest_over_mean: float = 1.0  # the same of the seconds that ranks have computed; NaN on a GPU
    after: Activation | None = None  # of a few samples, after the step, where no mini-batch follows that would show it


def update(learner: Learner, batch: Batch) -> Iterator[tuple[MiniBatchReport, Batch]]:
    """Make an optimiser step for each of the actor's mini-batches, in each of its epochs.

    Groups stay whole within a mini-batch, and an epoch has the mini-batches of the one before. After each step it
    yields its report and the batch, in which the samples trained so far have their `stats`. The loss is
    −Σ_i per_sequence_i / (sequences of the mini-batch that take part), whatever the cut into micro-batches.
    """
    actor, critic = learner.actor, learner.critic
    for number in range(actor.updates_per_step):
        groups = mini_batches(batch, actor.mini_batches)[number % actor.mini_batches]
        samples = trained_samples(groups, actor)
        # Where mini-batches follow, their own forward passes show what the step has changed.
        watched = samples if actor.updates_per_step == 1 else []
        before = watched_experts(learner, watched)
        denominators = denominators_of(groups, actor.length_norm, learner.max_tokens)
        report, trained = accumulate_gradient(learner, samples, denominators, number)
        finite = math.isfinite(report.loss) and math.isfinite(report.value_loss)
        step = learner.optimizer.step(loss_is_finite=finite)
        report = replace(
            report,
            step=step,
            critic_step=None if critic is None else critic.optimizer.step(loss_is_finite=finite and step.applied),
            clip_range=(actor.clip_low, actor.clip_high),
            after=activation(learner.policy.routing, watched_experts(learner, watched), before),
        )
        batch = batch.with_changed(trained)
        yield report, batch


def accumulate_gradient(
    learner: Learner, samples: Sequence[Sample], denominators: Denominators, mini_batch: int
) -> tuple[MiniBatchReport, dict[Sample, Sample]]:
    """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch; the samples as they are after it."""
    if not samples:
        return MiniBatchReport(), {}
    losses, computed_places, half = list[Loss](), list[int](), None
    split = split_point(samples) if learner.actor.gradient_noise else 0
    start = time.thread_time()  # which does not go on while this rank waits for others
    for places, is_second in micro_batches(learner, samples):
        learner.check_stop()
        if is_second and split and half is None:
            half = [gradient.clone() for gradient in learner.optimizer.gradient()]
            if num_ranks() > 1:
                add_up(half)
        if not places:  # of another rank alone
            _pass_along(learner)
            continue
        loss = micro_batch_loss(learner, [samples[place] for place in places], denominators)
        if loss.total.requires_grad:
            loss.total.backward()
        losses.append(loss)
        computed_places += places
    # A GPU computes beside this thread, and waits for other ranks in between.
    seconds = time.thread_time() - start if learner.policy.device.type == "cpu" else math.nan
    if num_ranks() > 1:
        add_up(learner.optimizer.gradient())
    noise = None if half is None else gradient_noise(half, learner.optimizer.gradient(), split / len(samples))
    seen = gathered(_seen(losses, computed_places, mini_batch, learner.actor, seconds))
    report, trained = _joined(seen, samples, denominators, noise)
    return replace(report, slowest_over_mean=slowest_over_mean(learner, samples)), trained


def _pass_along(learner: Learner) -> None:
    """A pass without a gradient, where only other ranks have something to train on."""
    likelihood = response_likelihood(learner.policy, [EMPTY])
    total = likelihood.logprobs.sum() * 0.0
    if learner.critic is not None:
        total = total + learner.critic.values([EMPTY], likelihood.hidden).sum() * 0.0
    total.backward()


_Seen = tuple[list[dict[str, float]], list[Activation], list[tuple[int, Sample]], float]


def _seen(losses: Sequence[Loss], places: Sequence[int], mini_batch: int, actor: ActorConfig, seconds: float) -> _Seen:
    """Return what this rank's passes have shown: terms, activations, the samples at their places, seconds."""
    terms: list[dict[str, float]] = []
    if losses:
        rows = torch.stack([torch.stack(list(loss.terms.values())) for loss in losses]).tolist()  # all read in one go
        terms = [dict(zip(losses[0].terms, row, strict=True)) for row in rows]
    activations = [loss.activation for loss in losses if loss.activation is not None]
    trained = with_stats(losses, mini_batch, actor).values() if losses else ()
    return terms, activations, [*zip(places, trained, strict=True)], seconds


def _joined(
    seen: Sequence[_Seen], samples: Sequence[Sample], denominators: Denominators, noise: Noise | None
) -> tuple[MiniBatchReport, dict[Sample, Sample]]:
    """The report of what all ranks have seen, and the samples as they are after the mini-batch, in their order."""
    rows = [row for terms, *_ in seen for row in terms]
    terms: dict[str, Any] = {name: sum(row[name] for row in rows) for name in rows[0]}
    if "balance_loss" in terms:
        terms["balance_loss"] *= denominators.num_sequences / len(samples)
    activations = [counted for _, rank_activations, *_ in seen for counted in rank_activations]
    trained = dict(pair for _, _, pairs, _ in seen for pair in pairs)
    seconds = [rank_seconds for *_, rank_seconds in seen]
    report = MiniBatchReport(
        **terms,
        measured_slowest_over_mean=max(seconds) * len(seconds) / sum(seconds),
        num_trained=len(samples),
        activation=sum(activations[1:], activations[0]) if activations else None,
        noise=noise,
    )
    after = {sample: trained[place] for place, sample in enumerate(samples)}
    if len(seen) > 1:  # what another rank has sent is a copy
        after = {sample: replace(received, query=sample.query) for sample, received in after.items()}
    return report, after
