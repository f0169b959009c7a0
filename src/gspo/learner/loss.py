"""The loss of a micro-batch: the surrogate, and what a recipe adds to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.learner.critic import Critic
from gspo.learner.cutting import rollouts_of, takes_part
from gspo.learner.item import Item, Observation, observe
from gspo.learner.volatility import Activation, activation
from gspo.model.likelihood import Likelihood, response_likelihood
from gspo.model.policy import Policy
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
from gspo.recipe.schema import ActorConfig
from gspo.types import Batch


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """What sums over a mini-batch are divided by, over all its micro-batches and ranks: no cut can change it."""

    num_sequences: int  # that take part in the loss
    mean_tokens: float = 1.0  # of those: response tokens
    group_tokens: Mapping[int, float] = field(default_factory=dict)  # the same of each rollout's group, by its index
    max_tokens: int = 1  # of any response


def denominators_of(batch: Batch, members: Sequence[int], max_tokens: int) -> Denominators:
    """Those of a mini-batch, given by its rollouts' indices."""
    rollouts = rollouts_of(batch)
    lengths = {index: len(rollouts[index].response_ids) for index in members if takes_part(batch, index)}
    group_of = [number for number, group in enumerate(batch.groups) for _ in group.rollouts]
    by_group: dict[int, list[int]] = {}
    for index, length in lengths.items():
        by_group.setdefault(group_of[index], []).append(length)
    return Denominators(
        num_sequences=len(lengths),
        mean_tokens=fmean(lengths.values()) if lengths else 0.0,
        group_tokens={index: fmean(by_group[group_of[index]]) for index in lengths},
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
    critic: Critic | None,
    items: Sequence[Item],
    actor: ActorConfig,
    denominators: Denominators,
    *,
    temperature: float,
) -> Loss:
    """One forward pass over some sequences of a mini-batch, and everything that is learned from it."""
    sequences = [item.sequence for item in items]
    likelihood = response_likelihood(
        policy, sequences, temperature=temperature, keep_router_logits=actor.router_aux_loss > 0
    )
    logprobs, count = likelihood.logprobs, denominators.num_sequences
    old = _packed(items, lambda item: item.old_logprobs, logprobs)
    lengths = torch.tensor([item.length for item in items])
    weights = _weights(items, old, lengths, actor)
    result = _surrogate(items, logprobs, old, lengths, weights, actor, denominators)
    total = -result.per_sequence.sum() / count
    observation = observe(items, result, logprobs, old, likelihood.entropy, weights)
    loss = Loss(total=total, terms={"loss": total.detach()}, observation=observation)
    # The one wait for a GPU: a backward pass that is not needed costs more.
    if (result.clipped | result.masked).all():  # no gradient to compute, and that of an infinite ratio would be NaN
        loss.total = loss.total.detach()
    if (divergence := _divergence(items, logprobs, lengths, actor)) is not None:
        loss.total = loss.total + actor.kl.coefficient * divergence / count
        loss.terms["kl"] = divergence.detach() / count
    if actor.entropy_bonus:
        loss.total = loss.total - actor.entropy_bonus * sequence_mean(likelihood.entropy, lengths).sum() / count
    if likelihood.router_logits:
        unbalanced = _balance_loss(items, likelihood, lengths) / count
        loss.total = loss.total + actor.router_aux_loss * unbalanced
        loss.terms["balance_loss"] = unbalanced.detach()
    if critic is not None:
        errors = _value_errors(critic, items, likelihood, lengths) / count
        loss.total = loss.total + critic.coefficient * errors
        loss.terms["value_loss"] = errors.detach()
    if policy.routing is not None and likelihood.experts is not None:
        before = [item.old_experts for item in items]
        loss.activation = activation(likelihood.experts, before, policy.routing.num_experts)
    return loss


def _surrogate(
    items: Sequence[Item],
    logprobs: Float[Tensor, "N"],
    old: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    weights: Float[Tensor, "N"] | None,
    actor: ActorConfig,
    denominators: Denominators,
) -> Surrogate:
    per_token = any(item.token_advantages is not None for item in items)
    advantages = torch.tensor([item.advantage for item in items], dtype=torch.float32)
    if per_token:
        pieces = [
            item.token_advantages if item.token_advantages is not None else torch.full((item.length,), item.advantage)
            for item in items
        ]
        advantages = torch.cat(pieces)
    norms: dict[str, float | Tensor] = {"mean": denominators.mean_tokens, "constant": float(denominators.max_tokens)}
    if actor.length_norm == "group":
        its_group = torch.tensor([denominators.group_tokens[item.index] for item in items])
        norms["group"] = its_group.to(logprobs.device, non_blocking=True)
    return surrogate(
        logprobs,
        old,
        advantages.to(logprobs.device, non_blocking=True),
        lengths,
        settings=surrogate_settings(actor),
        tokens_per_sequence=norms.get(actor.length_norm),
        sampler_logprobs=_packed(items, lambda item: item.sampler_logprobs, logprobs),
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


def _weights(
    items: Sequence[Item], old: Float[Tensor, "N"], lengths: Int[Tensor, "B"], actor: ActorConfig
) -> Tensor | None:
    if actor.correction == "none":
        return None
    sampler = _packed(items, lambda item: item.sampler_logprobs, old)
    bounds, level = (actor.correction_low, actor.correction_high), actor.correction_level
    return correction_weights(old, sampler, lengths, actor.correction, bounds, level=level)


def _packed(
    items: Sequence[Item], known: Callable[[Item], Float[Tensor, "T"] | None], own: Float[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """One after another on the device; where it is known of none, what the pass itself gave, without its gradient."""
    found = [one for item in items if (one := known(item)) is not None]
    if not found:
        return own.detach()
    assert len(found) == len(items), "known of some sequences of a micro-batch, and not of others"
    return torch.cat(found).to(own.device, non_blocking=True)


def _divergence(
    items: Sequence[Item], logprobs: Float[Tensor, "N"], lengths: Int[Tensor, "B"], actor: ActorConfig
) -> Float[Tensor, ""] | None:
    """The KL from the reference, a token, summed over the sequences; None where the loss has no such term."""
    if not actor.kl.coefficient or actor.kl.place != "loss":
        return None
    reference = _packed(items, lambda item: item.reference_logprobs, logprobs)
    return sequence_mean(kl_estimate(logprobs, reference, actor.kl.estimator), lengths).sum()


def _value_errors(
    critic: Critic, items: Sequence[Item], likelihood: Likelihood, lengths: Int[Tensor, "B"]
) -> Float[Tensor, ""]:
    """The value loss of a token, summed over the sequences."""
    values = critic.values([item.sequence for item in items], likelihood.hidden)
    old_values = _packed(items, lambda item: item.old_values, values)
    returns = _packed(items, lambda item: item.returns, values)
    return sequence_mean(value_loss(values, old_values, returns, critic.settings.clip), lengths).sum()


def _balance_loss(items: Sequence[Item], likelihood: Likelihood, lengths: Int[Tensor, "B"]) -> Float[Tensor, ""]:
    """Summed over the sequences, by the experts that were used, replayed ones too."""
    assert likelihood.experts is not None
    used = [item.sequence.experts or own for item, own in zip(items, likelihood.experts, strict=True)]
    rows = torch.cat([experts.row for experts in used]).long()
    rows = rows.to(likelihood.router_logits[0].device, non_blocking=True)
    return balance_loss(likelihood.router_logits, rows, lengths).sum()
