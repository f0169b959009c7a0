"""From groups and their scores to a batch: the advantages, and who takes part in the loss."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.config import Actor, Critic
from gspo.config import Rollout as Sampling
from gspo.objective import advantages_and_returns, kl_estimate, token_advantages
from gspo.objective.gae import whitened
from gspo.records import Appraisal, Batch, Group, Rollout, Score


def make_batch(
    groups: Sequence[Group],
    scores: Sequence[Score],
    actor: Actor | None = None,
    *,
    sampling: Sampling | None = None,
    critic: Critic | None = None,
    appraisal: Appraisal | None = None,
    dropped: tuple[tuple[Group, tuple[Score, ...]], ...] = (),
) -> Batch:
    """Groups with their scores and the actor's advantages; an unscored rollout takes no part in its group."""
    actor, appraisal = actor or Actor(), appraisal or Appraisal()
    masked = _masked(groups, scores, sampling)
    batch = Batch(
        groups=tuple(groups),
        scores=tuple(scores),
        advantages=(0.0,) * len(scores),
        masked=masked,
        appraisal=appraisal,
        dropped=dropped,
    )
    rewards = _token_rewards(batch, actor)
    if actor.advantage == "gae":
        return _with_gae(batch, rewards, critic or Critic())
    return _with_group_advantages(batch, rewards, actor)


def rewards_differ(group: Group, scores: Sequence[Score], sampling: Sampling | None = None) -> bool:
    """Whether a group's responses, or their tokens, can be told apart by their rewards.

    With `sampling`, only those that it leaves in the loss count.
    """
    batch = make_batch([group], scores, sampling=sampling)
    return any(batch.advantages) or any(bool(one.any()) for one in batch.token_advantages.values())


def _masked(groups: Sequence[Group], scores: Sequence[Score], sampling: Sampling | None) -> frozenset[int]:
    if sampling is None or sampling.overlong != "mask":
        return frozenset()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return frozenset(index for index, rollout in enumerate(rollouts) if rollout.finish_reason == "length")


def _token_rewards(batch: Batch, actor: Actor) -> list[Float[Tensor, "_"]]:
    """What each token's advantage is made of, in float64, so that nearly equal rewards keep their order.

    NaN: not scored. One number for a response whose tokens all have the same, unless a value model tells them apart.
    """
    found = []
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for index, (rollout, score) in enumerate(zip(rollouts, batch.scores, strict=True)):
        reward = torch.tensor([float("nan") if score.reward is None else score.reward], dtype=torch.float64)
        kl = _kl_in_reward(rollout, batch.appraisal.reference_logprobs.get(index), actor)
        if actor.advantage == "gae":
            length = len(rollout.response_ids)
            reward = torch.cat([torch.zeros(length - 1, dtype=torch.float64), reward])
            reward = reward if kl is None else reward - kl
        else:
            if score.token_rewards is not None and score.reward is not None:
                reward = score.token_rewards.double()
            reward = reward if kl is None else reward - kl.sum()
        found.append(reward)
    return found


def _kl_in_reward(rollout: Rollout, reference: Float[Tensor, "T"] | None, actor: Actor) -> Float[Tensor, "T"] | None:
    """What the reward of each token is lowered by; None where there is no such term."""
    if reference is None or actor.kl.place != "reward":
        return None
    estimate = kl_estimate(rollout.sampler_logprobs.double(), reference.double(), actor.kl.estimator)
    return actor.kl.coefficient * estimate


def _with_group_advantages(batch: Batch, rewards: Sequence[Float[Tensor, "_"]], actor: Actor) -> Batch:
    ids = torch.tensor([number for number, group in enumerate(batch.groups) for _ in group.rollouts])
    lengths = torch.tensor([len(one) for one in rewards])
    found = token_advantages(torch.cat(list(rewards)), lengths, ids, kind=actor.advantage, ddof=actor.advantage_ddof)
    return _with_advantages(batch, found.split(lengths.tolist()))


def _with_gae(batch: Batch, rewards: Sequence[Float[Tensor, "_"]], critic: Critic) -> Batch:
    scored = [index for index, score in enumerate(batch.scores) if score.reward is not None]
    advantages: list[Tensor] = [torch.zeros_like(reward) for reward in rewards]
    returns: dict[int, Tensor] = {}
    for index in scored:
        values = batch.appraisal.values[index].double()
        advantages[index], its = advantages_and_returns(
            rewards[index], values, gamma=critic.gae_gamma, lam=critic.gae_lambda
        )
        returns[index] = its.float()
    trained = [index for index in scored if index not in batch.masked]
    if critic.whiten and trained:
        for index, one in zip(trained, whitened([advantages[index] for index in trained]), strict=True):
            advantages[index] = one
    return replace(_with_advantages(batch, advantages), returns=returns)


def _with_advantages(batch: Batch, advantages: Sequence[Float[Tensor, "_"]]) -> Batch:
    by_token: Mapping[int, Tensor] = {
        index: one.float() for index, one in enumerate(advantages) if len(one) > 1 and index not in batch.masked
    }
    means = tuple(0.0 if index in batch.masked else float(one.mean()) for index, one in enumerate(advantages))
    return replace(batch, advantages=means, token_advantages=by_token)
