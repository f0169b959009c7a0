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
from gspo.model.likelihood import Likelihood, response_likelihood
from gspo.model.policy import Policy
from gspo.objective import Surrogate, balance_loss, correction_weights, kl_estimate, surrogate, value_loss
from gspo.objective.ratio import sequence_mean
from gspo.recipe.schema import ActorConfig
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


@dataclass(kw_only=True)
class Loss:
    """The terms of a loss, each already divided by the mini-batch's denominators, and what was seen on the way."""

    total: Tensor  # to be minimised
    terms: dict[str, Float[Tensor, ""]]  # by name, on the device: the surrogate, the others without their coefficients
    observation: Observation
    activation: Activation | None = None


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
    sequences = [token_sequence(sample, actor) for sample in samples]
    likelihood = response_likelihood(
        policy, sequences, temperature=temperature, keep_router_logits=actor.router_aux_loss > 0
    )
    logprobs, count = likelihood.logprobs, denominators.num_sequences
    old = _packed([sample.old_logprobs for sample in samples], logprobs)
    lengths = torch.tensor([sample.num_written for sample in samples])
    weights = _weights(samples, old, lengths, actor)
    result = _surrogate(samples, logprobs, old, weights, actor, denominators)
    total = -result.per_sequence.sum() / count
    observation = observe(samples, result, logprobs, old, likelihood.entropy, weights)
    loss = Loss(total=total, terms={"loss": total.detach()}, observation=observation)
    # The one wait for a GPU: a backward pass that is not needed costs more.
    if (result.clipped | result.masked).all():  # no gradient to compute, and that of an infinite ratio would be NaN
        loss.total = loss.total.detach()

    if actor.kl.coefficient and actor.kl.place == "loss":
        reference = _packed([sample.reference_logprobs for sample in samples], logprobs)
        divergence = sequence_mean(kl_estimate(logprobs, reference, actor.kl.estimator), lengths).sum()
        loss.total = loss.total + actor.kl.coefficient * divergence / count
        loss.terms["kl"] = divergence.detach() / count
    if actor.entropy_bonus:
        loss.total = loss.total - actor.entropy_bonus * sequence_mean(likelihood.entropy, lengths).sum() / count
    if likelihood.router_logits:
        unbalanced = _balance_loss(samples, likelihood, lengths, actor) / count
        loss.total = loss.total + actor.router_aux_loss * unbalanced
        loss.terms["balance_loss"] = unbalanced.detach()
    if critic is not None:
        errors = _value_errors(critic, samples, likelihood, lengths, actor) / count
        loss.total = loss.total + critic.coefficient * errors
        loss.terms["value_loss"] = errors.detach()
    if policy.routing is not None and likelihood.experts is not None:
        before = [sample.old_experts or sample.experts for sample in samples]
        loss.activation = activation(likelihood.experts, before, policy.routing.num_experts)
    return loss


def _surrogate(
    samples: Sequence[Sample],
    logprobs: Float[Tensor, "N"],
    old: Float[Tensor, "N"],
    weights: Float[Tensor, "N"] | None,
    actor: ActorConfig,
    denominators: Denominators,
) -> Surrogate:
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    lengths = torch.tensor([sample.num_written for sample in samples])
    if any(sample.token_advantages is not None for sample in samples):
        own = [
            torch.full((sample.num_written,), sample.advantage)
            if sample.token_advantages is None
            else sample.token_advantages
            for sample in samples
        ]
        advantages = torch.cat(own)
    norms: dict[str, float | Tensor] = {"mean": denominators.mean_tokens, "constant": float(denominators.max_tokens)}
    if actor.length_norm == "group":
        group_tokens = torch.tensor([denominators.group_tokens[sample] for sample in samples])
        norms["group"] = group_tokens.to(logprobs.device, non_blocking=True)
    return surrogate(
        logprobs,
        old,
        advantages.to(logprobs.device, non_blocking=True),
        lengths,
        level=actor.importance_sampling_level,
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
        name=actor.surrogate,
        length_norm=actor.length_norm,
        tokens_per_sequence=norms.get(actor.length_norm),
        dual_clip=actor.dual_clip,
        minirl_cap=actor.minirl_cap,
        sapo_temperature=actor.sapo_temperature,
        sampler_logprobs=_packed([sample.sampler_logprobs for sample in samples], logprobs),
        weights=weights,
        opsm_delta=actor.opsm_delta,
    )


def _weights(
    samples: Sequence[Sample], old: Float[Tensor, "N"], lengths: Int[Tensor, "B"], actor: ActorConfig
) -> Tensor | None:
    if actor.correction == "none":
        return None
    sampler = _packed([sample.sampler_logprobs for sample in samples], old)
    low, high, level = actor.correction_low, actor.correction_high, actor.correction_level
    return correction_weights(old, sampler, lengths, actor.correction, low, high, level=level)


def _packed(values: Sequence[Float[Tensor, "_"] | None], own: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """One after another on the device; where no sample has any, what the pass itself gave, without its gradient."""
    given = [piece for piece in values if piece is not None]
    if not given:
        return own.detach()
    assert len(given) == len(values), "some samples of a micro-batch have these values, and others have not"
    return torch.cat(given).to(own.device, non_blocking=True)


def _value_errors(
    critic: Critic, samples: Sequence[Sample], likelihood: Likelihood, lengths: Int[Tensor, "B"], actor: ActorConfig
) -> Float[Tensor, ""]:
    """The value loss of a token, summed over the sequences."""
    values = critic.values([token_sequence(sample, actor) for sample in samples], likelihood.hidden)
    old_values = _packed([sample.values for sample in samples], values)
    returns = _packed([sample.returns for sample in samples], values)
    return sequence_mean(value_loss(values, old_values, returns, critic.settings.clip), lengths).sum()


def _balance_loss(
    samples: Sequence[Sample], likelihood: Likelihood, lengths: Int[Tensor, "B"], actor: ActorConfig
) -> Float[Tensor, ""]:
    """Summed over the sequences, by the experts that were used, replayed ones too."""
    assert likelihood.experts is not None
    replayed = [token_sequence(sample, actor).experts for sample in samples]
    used = zip(samples, replayed, likelihood.experts, strict=True)
    rows = torch.cat([(experts or own).row[sample.loss_mask] for sample, experts, own in used]).long()
    rows = rows.to(likelihood.router_logits[0].device, non_blocking=True)
    return balance_loss(likelihood.router_logits, rows, lengths).sum()
