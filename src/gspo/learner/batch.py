"""From groups and their scores to a batch: the advantages, and who takes part in the loss."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.learner.cutting import rollouts_of
from gspo.objective import advantages_and_returns, kl_estimate, token_advantages
from gspo.objective.gae import whitened
from gspo.recipe.schema import ActorConfig, CriticConfig, RolloutConfig
from gspo.reward.overlong import without_penalty
from gspo.types import Appraisal, Batch, Group, Rollout, Score


def make_batch(
    groups: Sequence[Group],
    scores: Sequence[Score],
    actor: ActorConfig | None = None,
    *,
    sampling: RolloutConfig | None = None,
    critic: CriticConfig | None = None,
    appraisal: Appraisal | None = None,
    dropped: tuple[tuple[Group, tuple[Score, ...]], ...] = (),
) -> Batch:
    """Groups with their scores and the actor's advantages; an unscored rollout takes no part in its group."""
    actor, appraisal = actor or ActorConfig(), appraisal or Appraisal()
    masked = _masked(groups, scores, sampling)
    batch = Batch(
        groups=tuple(groups),
        scores=tuple(scores),
        advantages=(0.0,) * len(scores),
        masked=masked,
        appraisal=appraisal,
        dropped=dropped,
    )
    if actor.advantage == "gae":
        return _with_gae(batch, critic or CriticConfig(), actor)
    return _with_group_advantages(batch, actor)


def rewards_differ(group: Group, scores: Sequence[Score], sampling: RolloutConfig | None = None) -> bool:
    """Whether a group's responses can be told apart by what the reward functions gave them, at their ends or before.

    A penalty for length alone does not tell: DAPO filters on whether answers are right (arXiv 2503.14476, Eq. 11). With
    `sampling`, only the responses that it leaves in the loss count.
    """
    batch = make_batch([group], [without_penalty(score) for score in scores], sampling=sampling)
    return any(batch.advantages) or any(bool(one.any()) for one in batch.token_advantages.values())


def _masked(groups: Sequence[Group], scores: Sequence[Score], sampling: RolloutConfig | None) -> frozenset[int]:
    if sampling is None or sampling.overlong != "mask":
        return frozenset()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return frozenset(index for index, rollout in enumerate(rollouts) if rollout.finish_reason == "length")


def _token_rewards(batch: Batch, actor: ActorConfig) -> list[Float[Tensor, "_"]]:
    """What the tokens of each response earn, in float64; NaN: not scored.

    One number where all is earned at the end, unless a value model tells tokens apart.
    """
    reference = batch.appraisal.reference_logprobs
    pairs = zip(rollouts_of(batch), batch.scores, strict=True)
    return [_earned(rollout, score, reference.get(index), actor) for index, (rollout, score) in enumerate(pairs)]


def _earned(
    rollout: Rollout, score: Score, reference: Float[Tensor, "T"] | None, actor: ActorConfig
) -> Float[Tensor, "_"]:
    whole = torch.tensor([float("nan") if score.reward is None else score.reward], dtype=torch.float64)
    kl = _kl_in_reward(rollout, reference, actor)
    if score.token_rewards is not None and score.reward is not None:
        return score.token_rewards.double() - (0 if kl is None else kl)
    if actor.advantage != "gae":
        return whole - (0 if kl is None else kl.sum())
    by_token = torch.cat([whole.new_zeros(len(rollout.response_ids) - 1), whole])
    return by_token - (0 if kl is None else kl)


def _kl_in_reward(
    rollout: Rollout, reference: Float[Tensor, "T"] | None, actor: ActorConfig
) -> Float[Tensor, "T"] | None:
    """What the reward of each token is lowered by; None where there is no such term."""
    if reference is None or actor.kl.place != "reward":
        return None
    estimate = kl_estimate(rollout.sampler_logprobs.double(), reference.double(), actor.kl.estimator)
    return actor.kl.coefficient * estimate


def _with_group_advantages(batch: Batch, actor: ActorConfig) -> Batch:
    compared = replace(batch, scores=_compared_scores(batch)) if actor.advantage in ("group", "batch") else batch
    rewards = _token_rewards(compared, actor)
    places = [
        torch.arange(len(own)) if score.places is None or len(own) == 1 else score.places
        for own, score in zip(rewards, batch.scores, strict=True)
    ]
    lengths = torch.tensor([len(own) for own in rewards])
    found = token_advantages(
        torch.cat(rewards),
        lengths,
        torch.tensor([number for number, group in enumerate(batch.groups) for _ in group.rollouts]),
        kind=actor.advantage,
        ddof=actor.advantage_ddof,
        places=torch.cat(places),
        discount=actor.discount,
    )
    return _with_advantages(batch, found.split(lengths.tolist()))


def _compared_scores(batch: Batch) -> tuple[Score, ...]:
    """Without the penalty for length in groups that differ by it alone, whose deviation would blow it up to ±1."""
    scores, found = iter(batch.scores), list[Score]()
    for group in batch.groups:
        its = [next(scores) for _ in group.rollouts]
        alone = any(score.penalty for score in its) and not rewards_differ(group, its)
        found += [without_penalty(score) for score in its] if alone else its
    return tuple(found)


def _with_gae(batch: Batch, critic: CriticConfig, actor: ActorConfig) -> Batch:
    scored = [index for index, score in enumerate(batch.scores) if score.reward is not None]
    advantages = [torch.zeros(len(rollout.response_ids), dtype=torch.float64) for rollout in rollouts_of(batch)]
    rewards, returns = _token_rewards(batch, actor), dict[int, Tensor]()
    if scored:
        lengths = [len(advantages[index]) for index in scored]
        packed = advantages_and_returns(
            torch.cat([rewards[index] for index in scored]),
            torch.cat([batch.appraisal.values[index].double() for index in scored]),
            torch.tensor(lengths),
            gamma=critic.gae_gamma,
            lam=critic.gae_lambda,
        )
        for index, own, its in zip(scored, *(one.split(lengths) for one in packed), strict=True):
            advantages[index], returns[index] = own, its.float()
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
