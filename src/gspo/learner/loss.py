"""The loss of a micro-batch: the surrogate, and what a recipe adds to it; and what its pass shows of each sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gspo import objective
from gspo.learner.micro_batching import Learner, token_sequence
from gspo.learner.volatility import Activation, activation
from gspo.model.packing import take
from gspo.model.policy import Likelihood, response_likelihood
from gspo.objective import Surrogate, SurrogateSettings
from gspo.objective.ratio import sequence_mean
from gspo.recipe.published import LengthNorm
from gspo.recipe.sections import ActorConfig
from gspo.types import Experts, Group, Sample, SequenceStats


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """The divisors of sums over a mini-batch, over all its micro-batches and ranks: no cut can change it.

    Example: Denominators(num_sequences=8, tokens={sample: 26.5, …}) at length_norm: mean
    """

    num_sequences: int  # that take part in the loss
    tokens: Mapping[Sample, float] = field(default_factory=dict)  # for each sample's own sum, where length_norm has any


def denominators_of(groups: Sequence[Group], norm: LengthNorm, max_tokens: int) -> Denominators:
    """Return those of a mini-batch, given by its groups; no response has more than `max_tokens`."""
    parts = [[sample for sample in group.samples if sample.takes_part] for group in groups]
    if norm in ("mean", "turns"):
        parts = [[sample for part in parts for sample in part]]
    tokens: dict[Sample, float] = {}
    for part in filter(None, parts):
        turns = [len(sample.written_turns) if norm == "turns" else 1 for sample in part]
        mean = sum(sample.num_written for sample in part) / sum(turns)
        own = [float(max_tokens) if norm == "constant" else mean * number for number in turns]
        tokens |= dict(zip(part, own, strict=True))
    return Denominators(num_sequences=len(tokens), tokens=tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """The terms of a micro-batch's loss, already divided by the mini-batch's denominators, and what its pass showed.

    All of it lies on the pass's device: a GPU is waited for once a mini-batch. Example, of two responses of 3 and 5
    tokens: terms = {"loss": tensor(-0.02)}, by_token is [9, 8], sequence_ratio = [1.0002, 0.9997].
    """

    total: Tensor  # to be minimised
    terms: dict[str, Float[Tensor, ""]]  # by name: the surrogate, the others without their coefficients
    samples: Sequence[Sample]
    by_token: Float[Tensor, "K N"]  # what `with_stats` reads
    sequence_ratio: Float[Tensor, "B"]
    experts: Sequence[Experts] | None  # of each sample; None: no routers can be watched
    activation: Activation | None


class _Pass:
    """A forward pass over some samples of a mini-batch."""

    def __init__(self, learner: Learner, samples: Sequence[Sample]) -> None:
        self.actor, self.samples = learner.actor, samples
        self.sequences = [token_sequence(sample, self.actor) for sample in samples]
        self.said = [said(sample) for sample in samples] if self.actor.observation_loss else []
        self.likelihood, self.said_logprobs = self._likelihoods(learner)
        self.lengths = torch.tensor([sample.num_written for sample in samples])
        self.old_logprobs = self.packed("old_logprobs")
        self.weights = self._weights()

    def _likelihoods(self, learner: Learner) -> tuple[Likelihood, Float[Tensor, "O"]]:
        """Return the likelihood of what the policy wrote, and log π of what was said to it, from one pass."""
        masks = [sample.loss_mask | own for sample, own in zip(self.samples, self.said, strict=False)]
        read = [replace(sequence, loss_mask=mask) for sequence, mask in zip(self.sequences, masks, strict=False)]
        whole = response_likelihood(
            learner.policy,
            read or self.sequences,
            temperature=learner.temperature,
            keep_router_logits=self.actor.router_aux_loss > 0,
        )
        if not read:
            return whole, whole.logprobs[:0]
        is_said = torch.cat([own[mask] for own, mask in zip(self.said, masks, strict=True)])
        rows = [tokens.nonzero()[:, 0].to(whole.logprobs.device) for tokens in (is_said, ~is_said)]
        return whole.at(rows[1]), take(whole.logprobs, rows[0])

    def packed(self, name: str) -> Float[Tensor, "N"]:
        """A field of the samples, one after another on the device; where none has it, the pass's own likelihoods."""
        values = [getattr(sample, name) for sample in self.samples]
        if all(value is None for value in values):
            return self.likelihood.logprobs.detach()
        return torch.cat(values).to(self.likelihood.logprobs.device, non_blocking=True)

    def per_sequence(self, values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        """The sum over sequences of the mean over tokens."""
        return sequence_mean(values, self.lengths).sum()

    def _weights(self) -> Float[Tensor, "N"] | None:
        actor = self.actor
        if actor.correction == "none":
            return None
        likelihoods = self.old_logprobs, self.packed("sampler_logprobs")
        level, bounds = actor.correction_level, (actor.correction_low, actor.correction_high)
        return objective.correction_weights(*likelihoods, self.lengths, actor.correction, bounds, level=level)


def said(sample: Sample) -> Bool[Tensor, "T"]:
    """The tokens that were said to the policy after a turn of its own: of each context, not what it begins with."""
    contexts = sample.loss_mask.tensor_split(list(sample.starts))
    return torch.cat([written.cumsum(0) > 0 for written in contexts]) & ~sample.loss_mask


def micro_batch_loss(learner: Learner, samples: Sequence[Sample], denominators: Denominators) -> Loss:
    """Make a forward pass over some samples of a mini-batch, and compute everything that is learned from it."""
    forward, actor, critic = _Pass(learner, samples), learner.actor, learner.critic
    likelihood, count = forward.likelihood, denominators.num_sequences
    result = _surrogate(forward, denominators)
    total = -result.per_sequence.sum() / count
    by_token = _by_token(forward, result)
    terms = {"loss": total.detach()}
    # The one wait for a GPU: a backward pass that is not needed costs more.
    if (result.clipped | result.masked).all():  # no gradient to compute, and that of an infinite ratio would be NaN
        # Ranks gather and add up in each pass, also in one without a gradient.
        total = likelihood.logprobs.sum() * 0.0 if learner.policy.is_sharded else total.detach()
    if actor.kl_in_loss:
        reference = forward.packed("reference_logprobs")
        divergence = forward.per_sequence(objective.kl_estimate(likelihood.logprobs, reference, actor.kl.estimator))
        total = total + actor.kl.coefficient * divergence / count
        terms["kl"] = divergence.detach() / count
    if actor.entropy_bonus:
        total = total - actor.entropy_bonus * forward.per_sequence(likelihood.entropy) / count
    if actor.observation_loss:
        lengths = torch.tensor([int(own.sum()) for own in forward.said])
        surprise = -sequence_mean(forward.said_logprobs, lengths).sum() / count
        total = total + actor.observation_loss * surprise
        terms["observation_loss"] = surprise.detach()
    if likelihood.router_logits:
        unbalanced = _balance_loss(forward) / count
        total = total + actor.router_aux_loss * unbalanced
        terms["balance_loss"] = unbalanced.detach()
    if critic is not None:
        values = critic.values(forward.sequences, likelihood.hidden)
        errors = objective.value_loss(values, forward.packed("values"), forward.packed("returns"), critic.settings.clip)
        value_error = forward.per_sequence(errors) / count
        total = total + critic.coefficient * value_error
        terms["value_loss"] = value_error.detach()
    before = [sample.old_experts or sample.experts for sample in samples]
    return Loss(
        total=total,
        terms=terms,
        samples=samples,
        by_token=by_token,
        sequence_ratio=result.sequence_ratio,
        experts=likelihood.experts,
        activation=activation(learner.policy.routing, likelihood.experts or (), before),
    )


def _surrogate(forward: _Pass, denominators: Denominators) -> Surrogate:
    actor, samples, logprobs = forward.actor, forward.samples, forward.likelihood.logprobs
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    if any(sample.token_advantages is not None for sample in samples):
        pairs = [(s.token_advantages, torch.full((s.num_written,), s.advantage)) for s in samples]
        advantages = torch.cat([same if tokens is None else tokens for tokens, same in pairs])
    tokens = None
    if actor.length_norm not in ("own", "none"):
        tokens = torch.tensor([denominators.tokens[sample] for sample in samples], dtype=torch.float32)
        tokens = tokens.to(logprobs.device, non_blocking=True)
    return objective.surrogate(
        logprobs,
        forward.old_logprobs,
        advantages.to(logprobs.device, non_blocking=True),
        forward.lengths,
        settings=surrogate_settings(actor),
        tokens_per_sequence=tokens,
        sampler_logprobs=forward.packed("sampler_logprobs"),
        weights=forward.weights,
    )


def surrogate_settings(actor: ActorConfig) -> SurrogateSettings:
    """The recipe's settings of the objective, whose keys have the same names but for two."""
    same = {
        setting.name: getattr(actor, setting.name)
        for setting in fields(SurrogateSettings)
        if setting.name not in ("name", "level")
    }
    return SurrogateSettings(name=actor.surrogate, level=actor.importance_sampling_level, **same)


def _balance_loss(forward: _Pass) -> Float[Tensor, ""]:
    """The routers' balance loss, summed over the sequences, by the experts that were used, replayed ones too."""
    assert forward.likelihood.experts is not None
    used = zip(forward.samples, forward.sequences, forward.likelihood.experts, strict=True)
    rows = torch.cat([(sequence.experts or experts).row[sample.loss_mask] for sample, sequence, experts in used]).long()
    rows = rows.to(forward.likelihood.router_logits[0].device, non_blocking=True)
    return objective.balance_loss(forward.likelihood.router_logits, rows, forward.lengths).sum()


def _by_token(forward: _Pass, result: Surrogate) -> Float[Tensor, "K N"]:
    """Return what `with_stats` reads. It must come before the backward pass, whose graph it reads."""
    logprobs, entropy = forward.likelihood.logprobs, forward.likelihood.entropy
    (slope,) = torch.autograd.grad(result.per_sequence.sum(), logprobs, retain_graph=True)
    log_ratio = logprobs.detach() - forward.old_logprobs
    ratio = log_ratio.exp()
    weights = torch.ones_like(ratio) if forward.weights is None else forward.weights
    summed = [result.clipped, result.masked, ratio, ratio**2, slope.abs(), weights, entropy.detach()]
    return torch.stack([*summed, forward.old_logprobs, log_ratio])


def with_stats(losses: Sequence[Loss], mini_batch: int, actor: ActorConfig) -> dict[Sample, Sample]:
    """The samples that a mini-batch trained, in their order, each with its stats; those of earlier epochs are kept.

    Its tokens' numbers come to the CPU here, at once. What a first pass shows of π_old is kept for the epochs to come.
    """
    samples = [sample for loss in losses for sample in loss.samples]
    by_token = torch.cat([loss.by_token for loss in losses], dim=1).cpu().split([s.num_written for s in samples], dim=1)
    ratios = torch.cat([loss.sequence_ratio for loss in losses]).tolist()
    nothing: list[None] = [None]
    experts = [sample_experts for loss in losses for sample_experts in (loss.experts or nothing * len(loss.samples))]
    is_old = actor.epochs > 1 and (actor.old_logprobs == "recompute" or actor.routing_replay == "policy")
    trained = {}
    for sample, sample_experts, sequence_ratio, piece in zip(samples, experts, ratios, by_token, strict=True):
        clipped, masked, ratio, square, slope, weight, entropy = piece[:-2].double().sum(1).tolist()
        stats = SequenceStats(
            mini_batch=mini_batch,
            num_tokens=sample.num_written,
            num_clipped=int(clipped),
            num_masked=int(masked),
            sequence_ratio=sequence_ratio,
            ratio_sum=ratio,
            ratio_square_sum=square,
            gradient_weight=slope,
            correction_weight=weight / sample.num_written,
            entropy_sum=entropy,
            old_logprobs=piece[-2].clone(),
            log_ratios=piece[-1].clone(),
        )
        trained[sample] = replace(sample, stats=stats, earlier_stats=sample.all_stats)
        if is_old and sample.stats is None:
            old = stats.old_logprobs if sample.old_logprobs is None else sample.old_logprobs
            trained[sample] = replace(
                trained[sample], old_logprobs=old, old_experts=sample.old_experts or sample_experts
            )
    return trained
