"""The loss of a micro-batch: the surrogate, and what a recipe adds to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.learner.critic import Critic
from gspo.learner.micro_batching import token_sequence
from gspo.learner.sequence_stats import Observation, observe
from gspo.learner.volatility import Activation, activation
from gspo.model.packing import TokenSequence
from gspo.model.policy import Likelihood, Policy, response_likelihood
from gspo.objective import (
    Surrogate,
    SurrogateSettings,
    balance_loss,
    correction_weights,
    kl_estimate,
    surrogate,
    value_loss,
)
from gspo.objective.ratio import sequence_mean
from gspo.recipe.sections import ActorConfig
from gspo.types import Group, Sample


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """What sums over a mini-batch are divided by, over all its micro-batches and ranks: no cut can change it."""

    num_sequences: int  # that take part in the loss
    mean_tokens: float = 1.0  # of those: tokens that the policy wrote
    group_tokens: Mapping[Sample, float] = field(default_factory=dict)  # the same mean over each sample's group
    max_tokens: int = 1  # of any response


def denominators_of(groups: Sequence[Group], max_tokens: int) -> Denominators:
    """Those of a mini-batch, given by its groups."""
    parts = [[sample for sample in group.samples if sample.takes_part] for group in groups]
    lengths = [sample.num_written for part in parts for sample in part]
    return Denominators(
        num_sequences=len(lengths),
        mean_tokens=fmean(lengths) if lengths else 0.0,
        group_tokens={sample: fmean(s.num_written for s in part) for part in parts for sample in part},
        max_tokens=max_tokens,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """The terms of a micro-batch's loss, already divided by the mini-batch's denominators, and what was seen."""

    total: Tensor  # to be minimised
    terms: dict[str, Float[Tensor, ""]]  # by name, on the device: the surrogate, the others without their coefficients
    observation: Observation
    activation: Activation | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pass:
    """One forward pass over some samples of a mini-batch."""

    samples: Sequence[Sample]
    sequences: Sequence[TokenSequence]
    likelihood: Likelihood
    lengths: Int[Tensor, "B"]
    actor: ActorConfig

    def packed(self, name: str) -> Float[Tensor, "N"]:
        """A field of the samples, one after another on the device; where none has it, the pass's own likelihoods."""
        values = [getattr(sample, name) for sample in self.samples]
        given = [value for value in values if value is not None]
        if not given:
            return self.likelihood.logprobs.detach()
        assert len(given) == len(values), f"some samples of a micro-batch have {name}, and others have not"
        return torch.cat(given).to(self.likelihood.logprobs.device, non_blocking=True)

    def per_sequence(self, values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        """The sum over sequences of the mean over tokens."""
        return sequence_mean(values, self.lengths).sum()


def micro_batch_loss(
    policy: Policy,
    samples: Sequence[Sample],
    actor: ActorConfig,
    denominators: Denominators,
    *,
    critic: Critic | None,
    temperature: float,
) -> Loss:
    """One forward pass over some samples of a mini-batch, and everything that is learned from it."""
    sequences, count = [token_sequence(sample, actor) for sample in samples], denominators.num_sequences
    likelihood = response_likelihood(
        policy, sequences, temperature=temperature, keep_router_logits=actor.router_aux_loss > 0
    )
    lengths = torch.tensor([sample.num_written for sample in samples])
    forward = _Pass(samples=samples, sequences=sequences, likelihood=likelihood, lengths=lengths, actor=actor)
    old = forward.packed("old_logprobs")
    weights = _weights(forward, old)
    result = _surrogate(forward, old, weights, denominators)
    total = -result.per_sequence.sum() / count
    observation = observe(samples, result, likelihood.logprobs, old, likelihood.entropy, weights)
    terms = {"loss": total.detach()}
    # The one wait for a GPU: a backward pass that is not needed costs more.
    if (result.clipped | result.masked).all():  # no gradient to compute, and that of an infinite ratio would be NaN
        total = total.detach()
    if actor.kl.coefficient and actor.kl.place == "loss":
        reference = forward.packed("reference_logprobs")
        divergence = forward.per_sequence(kl_estimate(likelihood.logprobs, reference, actor.kl.estimator))
        total = total + actor.kl.coefficient * divergence / count
        terms["kl"] = divergence.detach() / count
    if actor.entropy_bonus:
        total = total - actor.entropy_bonus * forward.per_sequence(likelihood.entropy) / count
    if likelihood.router_logits:
        unbalanced = _balance_loss(forward) / count
        total = total + actor.router_aux_loss * unbalanced
        terms["balance_loss"] = unbalanced.detach()
    if critic is not None:
        values = critic.values(sequences, likelihood.hidden)
        errors = value_loss(values, forward.packed("values"), forward.packed("returns"), critic.settings.clip)
        value_error = forward.per_sequence(errors) / count
        total = total + critic.coefficient * value_error
        terms["value_loss"] = value_error.detach()
    seen = None
    if policy.routing is not None and likelihood.experts is not None:
        before = [sample.old_experts or sample.experts for sample in samples]
        seen = activation(likelihood.experts, before, policy.routing.num_experts)
    return Loss(total=total, terms=terms, observation=observation, activation=seen)


def _surrogate(
    forward: _Pass, old: Float[Tensor, "N"], weights: Float[Tensor, "N"] | None, denominators: Denominators
) -> Surrogate:
    actor, samples, logprobs = forward.actor, forward.samples, forward.likelihood.logprobs
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    if any(sample.token_advantages is not None for sample in samples):
        own = [(s.token_advantages, torch.full((s.num_written,), s.advantage)) for s in samples]
        advantages = torch.cat([same if tokens is None else tokens for tokens, same in own])
    norms: dict[str, float | Tensor] = {"mean": denominators.mean_tokens, "constant": float(denominators.max_tokens)}
    if actor.length_norm == "group":
        group_tokens = torch.tensor([denominators.group_tokens[sample] for sample in samples])
        norms["group"] = group_tokens.to(logprobs.device, non_blocking=True)
    return surrogate(
        logprobs,
        old,
        advantages.to(logprobs.device, non_blocking=True),
        forward.lengths,
        settings=surrogate_settings(actor),
        tokens_per_sequence=norms.get(actor.length_norm),
        sampler_logprobs=forward.packed("sampler_logprobs"),
        weights=weights,
    )


def surrogate_settings(actor: ActorConfig) -> SurrogateSettings:
    """The recipe's settings of the objective."""
    return SurrogateSettings(
        name=actor.surrogate,
        level=actor.importance_sampling_level,
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
        length_norm=actor.length_norm,
        dual_clip=actor.dual_clip,
        minirl_cap=actor.minirl_cap,
        sapo_temperature=actor.sapo_temperature,
        opsm_delta=actor.opsm_delta,
    )


def _weights(forward: _Pass, old: Float[Tensor, "N"]) -> Float[Tensor, "N"] | None:
    actor = forward.actor
    if actor.correction == "none":
        return None
    bounds, level = (actor.correction_low, actor.correction_high), actor.correction_level
    sampler_logprobs = forward.packed("sampler_logprobs")
    return correction_weights(old, sampler_logprobs, forward.lengths, actor.correction, bounds, level=level)


def _balance_loss(forward: _Pass) -> Float[Tensor, ""]:
    """Summed over the sequences, by the experts that were used, replayed ones too."""
    assert forward.likelihood.experts is not None
    used = zip(forward.samples, forward.sequences, forward.likelihood.experts, strict=True)
    rows = torch.cat([(sequence.experts or own).row[sample.loss_mask] for sample, sequence, own in used]).long()
    rows = rows.to(forward.likelihood.router_logits[0].device, non_blocking=True)
    return balance_loss(forward.likelihood.router_logits, rows, forward.lengths).sum()
