"""What is known of π_old on a rollout batch: log-likelihoods and experts, the engine's or the policy's own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.learner.cutting import cut, mini_batches, rollouts_of, trainable_items
from gspo.model.likelihood import response_likelihood
from gspo.model.policy import Policy
from gspo.recipe.schema import ActorConfig
from gspo.types import Batch, Experts


@dataclass(frozen=True, kw_only=True, eq=False)
class Old:
    """π_old on one rollout."""

    logprobs: Float[Tensor, "T"]  # of its tokens
    experts: Experts | None  # its routers' choice


def old_policy(
    policy: Policy,
    batch: Batch,
    actor: ActorConfig,
    *,
    temperature: float,
    check_stop: Callable[[], None] = lambda: None,
) -> dict[int, Old]:
    """π_old on the trainable rollouts, by rollout index: as the engine had it, or the policy itself (§5.4).

    The policy's own is not computed for the first mini-batch, whose forward pass in the update is π_old's. Routers
    that are to replay the policy's experts need its pass even where the engine's log-likelihoods are taken.
    """
    rollouts, sequences = rollouts_of(batch), dict(trainable_items(batch, actor))
    found: dict[int, Old] = {}
    if actor.old_logprobs == "engine":
        for index in sequences:
            found[index] = Old(logprobs=rollouts[index].sampler_logprobs, experts=rollouts[index].experts)
        if actor.routing_replay != "policy":
            return found
    for members in mini_batches(batch, actor.mini_batches)[1:]:
        # Cut as the update cuts: other shapes round differently, in bfloat16 by as much as GSPO's clip range.
        indices = [index for index in members if index in sequences]
        for part in cut(policy, [sequences[index] for index in indices], actor):
            check_stop()
            chosen = [indices[i] for i in part]
            with torch.no_grad():
                likelihood = response_likelihood(policy, [sequences[i] for i in chosen], temperature=temperature)
            lengths = [len(sequences[index].response_ids) for index in chosen]
            experts = likelihood.experts or [None] * len(chosen)
            for index, logprobs, own in zip(chosen, likelihood.logprobs.cpu().split(lengths), experts, strict=True):
                found[index] = Old(logprobs=found[index].logprobs if index in found else logprobs, experts=own)
    return found
