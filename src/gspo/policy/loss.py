"""The loss of a micro-batch: the surrogate, and what a recipe adds to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.config import Actor
from gspo.objective import Surrogate, balance_loss, correction_weights, kl_estimate, surrogate, value_loss
from gspo.objective.ratio import sequence_mean
from gspo.policy.critic import Critic
from gspo.policy.cutting import rollouts_of, takes_part
from gspo.policy.item import Item, Trained, observed
from gspo.policy.likelihood import Likelihood, response_likelihood
from gspo.policy.model import Policy
from gspo.policy.volatility import Activation, activation
from gspo.records import Batch


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """What sums over a mini-batch are divided by, over all its micro-batches and ranks: no cut can change it."""

    num_sequences: int  # that take part in the loss
    mean_tokens: float = 1.0  # of those: response tokens
    max_tokens: int = 1  # of any response


def denominators_of(batch: Batch, members: Sequence[int], max_tokens: int) -> Denominators:
    """Those of a mini-batch, given by its rollouts' indices."""
    rollouts = rollouts_of(batch)
    lengths = [len(rollouts[index].response_ids) for index in members if takes_part(batch, index)]
    mean_tokens = sum(lengths) / max(1, len(lengths))
    return Denominators(num_sequences=len(lengths), mean_tokens=mean_tokens, max_tokens=max_tokens)


@dataclass(kw_only=True)
class Loss:
    """The terms of a loss, each already divided by the mini-batch's denominators, and what was seen on the way."""

    total: Tensor = field(default_factory=lambda: torch.zeros(()))  # to be minimised
    surrogate: float = 0.0
    balance: float = 0.0  # the following without their coefficients
    kl: float = 0.0
    value: float = 0.0
    trained: list[Trained] = field(default_factory=list)
    activation: Activation | None = None


def micro_batch_loss(
    policy: Policy,
    critic: Critic | None,
    items: Sequence[Item],
    actor: Actor,
    denominators: Denominators,
    mini_batch: int,
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
    lengths = torch.tensor([item.length for item in items], device=logprobs.device)
    weights = _weights(items, old, lengths, actor)
    result = _surrogate(items, logprobs, old, lengths, weights, actor, denominators)
    loss = Loss(total=-result.per_sequence.sum() / count)
    loss.surrogate = loss.total.item()
    loss.trained = observed(items, result, logprobs, old, likelihood.entropy, weights, mini_batch)
    if (result.clipped | result.masked).all():  # no gradient to compute, and that of an infinite ratio would be NaN
        loss.total = loss.total.detach()
    if (divergence := _divergence(items, logprobs, lengths, actor)) is not None:
        loss.total = loss.total + actor.kl.coefficient * divergence / count
        loss.kl = divergence.item() / count
    if actor.entropy_bonus:
        loss.total = loss.total - actor.entropy_bonus * sequence_mean(likelihood.entropy, lengths).sum() / count
    if likelihood.router_logits:
        unbalanced = _balance_loss(items, likelihood, lengths) / count
        loss.total = loss.total + actor.router_aux_loss * unbalanced
        loss.balance = unbalanced.item()
    if critic is not None:
        errors = _value_errors(critic, items, likelihood, lengths) / count
        loss.total = loss.total + critic.coefficient * errors
        loss.value = errors.item()
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
    actor: Actor,
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
    norms = {"mean": denominators.mean_tokens, "constant": float(denominators.max_tokens)}
    return surrogate(
        logprobs,
        old,
        advantages.to(logprobs.device),
        lengths,
        level=actor.importance_sampling_level,
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
        name=actor.surrogate,
        length_norm=actor.length_norm,
        tokens_per_sequence=norms.get(actor.length_norm),
        dual_clip=actor.dual_clip,
        sapo_temperature=actor.sapo_temperature,
        sampler_logprobs=_packed(items, lambda item: item.sampler_logprobs, logprobs),
        weights=weights,
        opsm_delta=actor.opsm_delta,
    )


def _weights(items: Sequence[Item], old: Float[Tensor, "N"], lengths: Int[Tensor, "B"], actor: Actor) -> Tensor | None:
    if actor.correction == "none":
        return None
    sampler = _packed(items, lambda item: item.sampler_logprobs, old)
    low, high = actor.correction_low, actor.correction_high
    return correction_weights(old, sampler, lengths, actor.correction, low, high)


def _packed(
    items: Sequence[Item], known: Callable[[Item], Float[Tensor, "T"] | None], own: Float[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """One after another on the device; of what is not known, what the pass itself gave, without its gradient."""
    pieces = own.detach().split([item.length for item in items])
    found = zip(map(known, items), pieces, strict=True)
    return torch.cat([piece if one is None else one.to(piece.device) for one, piece in found])


def _divergence(
    items: Sequence[Item], logprobs: Float[Tensor, "N"], lengths: Int[Tensor, "B"], actor: Actor
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
    rows = torch.cat([experts.row for experts in used]).long().to(lengths.device)
    return balance_loss(likelihood.router_logits, rows, lengths).sum()
