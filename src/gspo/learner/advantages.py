"""From scores to advantages, and who takes part in the loss."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.errors import UserError
from gspo.objective import (
    advantages_and_returns,
    distillation_advantages,
    kl_estimate,
    normalize_then_sum,
    optimal_token_advantages,
    token_advantages,
    turn_advantages,
)
from gspo.objective.advantage import EQUAL_NEAR_ZERO, whitened
from gspo.recipe.sections import ActorConfig, CriticConfig, RolloutConfig, TeacherConfig
from gspo.reward.overlong import without_penalty
from gspo.types import Batch, Group, Sample


def with_advantages(
    batch: Batch,
    actor: ActorConfig | None = None,
    *,
    sampling: RolloutConfig | None = None,
    critic: CriticConfig | None = None,
    teacher: TeacherConfig | None = None,
) -> Batch:
    """A scored batch with the actor's advantages, and the teacher's.

    A sample without a reward takes no part in its group, and is not taught.
    """
    actor = actor or ActorConfig()
    masks = sampling is not None and sampling.overlong == "mask"
    batch = batch.with_changed({s: replace(s, masked=masks and s.finish_reason == "length") for s in batch.samples})
    batch = _with_gae(batch, critic or CriticConfig(), actor) if actor.advantage == "gae" else _compared(batch, actor)
    return batch if teacher is None or not teacher.is_on else _with_teacher(batch, teacher)


def rewards_differ(
    groups: Sequence[Group], sampling: RolloutConfig | None = None, actor: ActorConfig | None = None
) -> list[bool]:
    """Tell, for each group, whether what the reward functions gave its samples, at their ends or before, differs.

    A penalty for length alone does not tell: DAPO filters on whether answers are right (arXiv 2503.14476, Eq. 11). With
    `sampling`, only the samples that it keeps in the loss count.
    """
    if not groups:
        return []
    own = ActorConfig() if actor is None else actor
    plain = ActorConfig(reward_aggregation=own.reward_aggregation)
    if own.turn_credit == "return_to_go":
        plain = ActorConfig(turn_credit=own.turn_credit, discount=own.discount)
    batch = with_advantages(Batch(groups=tuple(map(_without_penalties, groups))), plain, sampling=sampling)
    return [any(sample.has_advantage for sample in group.samples) for group in batch.groups]


def _penalty_alone_differs(group: Group) -> bool:
    return any(s.score and s.score.penalty for s in group.samples) and not any(rewards_differ([group]))


def _without_penalties(group: Group) -> Group:
    return Group(samples=tuple(replace(s, score=s.score and without_penalty(s.score)) for s in group.samples))


def _rewards(sample: Sample, actor: ActorConfig, *, by_token: bool = False) -> Float[Tensor, "_"]:
    """Return what the tokens of a sample earn, in float64; NaN: not scored.

    It is one number where all is earned at the end, unless it is asked for `by_token`.
    """
    score, kl = sample.score, torch.zeros((), dtype=torch.float64)
    if sample.reference_logprobs is not None and actor.kl.place == "reward":
        logprobs, reference = sample.engine_logprobs.double(), sample.reference_logprobs.double()
        kl = actor.kl.coefficient * kl_estimate(logprobs, reference, actor.kl.estimator)
    if score is not None and score.reward is not None and score.token_rewards is not None:
        return score.token_rewards.double() - kl
    whole = torch.tensor([float("nan") if sample.reward is None else sample.reward], dtype=torch.float64)
    if not by_token:
        return whole - kl.sum()
    return torch.cat([whole.new_zeros(sample.num_written - 1), whole]) - kl


def _compared(batch: Batch, actor: ActorConfig) -> Batch:
    """Return each sample compared with its group."""
    groups = batch.groups
    group_ids = torch.tensor([number for number, group in enumerate(groups) for _ in group.samples])
    if actor.reward_aggregation == "normalize_then_sum":
        advantages = normalize_then_sum(*_by_function(batch.samples), group_ids, ddof=actor.advantage_ddof)
        return _with_advantages(batch, advantages.split(1))
    if actor.turn_credit == "return_to_go":
        return _by_turn(batch, actor, group_ids)
    if actor.advantage == "optimal_token_baseline":
        return _with_optimal_baseline(batch, actor, group_ids)
    if actor.advantage in ("group", "batch"):
        # A penalty that alone tells a group's samples apart would be blown up to ±1 by their deviation.
        groups = tuple(_without_penalties(group) if _penalty_alone_differs(group) else group for group in groups)
    rewards = [_rewards(sample, actor) for group in groups for sample in group.samples]
    given = [sample.score.places if sample.score else None for sample in batch.samples]
    places = [
        torch.arange(len(sample_rewards)) if segments is None or len(sample_rewards) == 1 else segments
        for sample_rewards, segments in zip(rewards, given, strict=True)
    ]
    lengths = torch.tensor([len(sample_rewards) for sample_rewards in rewards])
    if actor.advantage == "max_rl" and (lowest := float(torch.cat(rewards).nan_to_num(0.0).min())) < -EQUAL_NEAR_ZERO:
        problem = f"max_rl divides by the mean of a group's rewards, and one is {lowest:g}"
        raise UserError(problem, where="actor.advantage", fix="give rewards of 0 or more, or set group_mean")
    advantages = token_advantages(
        torch.cat(rewards),
        lengths,
        group_ids,
        kind=actor.advantage,
        ddof=actor.advantage_ddof,
        places=torch.cat(places),
        discount=actor.discount,
    )
    return _with_advantages(batch, advantages.split(lengths.tolist()))


def _by_turn(batch: Batch, actor: ActorConfig, group_ids: Int[Tensor, "B"]) -> Batch:
    """Return each turn of the policy compared with those of its group, with its advantage at each of its tokens."""
    turns = [torch.tensor(sample.written_turns, dtype=torch.float64).T for sample in batch.samples]
    orders = [torch.tensor(sample.turns_in_time) for sample in batch.samples]
    rows = zip(batch.samples, turns, orders, strict=True)
    rewards = torch.cat([_turn_rewards(sample, actor, own)[order] for sample, own, order in rows])
    lengths = torch.tensor([own.shape[1] for own in turns])
    advantages = turn_advantages(rewards, lengths, group_ids, discount=actor.discount).split(lengths.tolist())
    pieces = zip(turns, orders, advantages, strict=True)
    by_token = [piece[order.argsort()].repeat_interleave(own[0].long()) for own, order, piece in pieces]
    return _with_advantages(batch, by_token)


def _with_optimal_baseline(batch: Batch, actor: ActorConfig, group_ids: Int[Tensor, "B"]) -> Batch:
    """Return each token compared with the group's tokens at its place, of which the surest count least."""
    if any(sample.squared_errors is None for sample in batch.samples if sample.reward is not None):
        raise ValueError("optimal_token_baseline takes the squared_errors of each scored sample: score_with_models")
    errors = [torch.zeros(s.num_written) if s.squared_errors is None else s.squared_errors for s in batch.samples]
    rewards, lengths = [_rewards(sample, actor, by_token=True) for sample in batch.samples], [*map(len, errors)]
    advantages = optimal_token_advantages(torch.cat(rewards), torch.cat(errors), torch.tensor(lengths), group_ids)
    return _with_advantages(batch, advantages.split(lengths))


def _turn_rewards(sample: Sample, actor: ActorConfig, turns: Float[Tensor, "2 K"]) -> Float[Tensor, "K"]:
    """Return what each of a sample's turns earns: the last has all that is not the environment's; NaN: not scored.

    `turns` are the tokens of each, and what the environment gave for it.
    """
    own = torch.stack([piece.sum() for piece in _rewards(sample, actor, by_token=True).split(turns[0].long().tolist())])
    weights = sample.score.weights if sample.score else {}
    given = turns[1] * sum(weights.get(name, 0.0) for name in ("environment", "agent"))
    return own + given - torch.cat([torch.zeros_like(given[1:]), given.sum(0, keepdim=True)])


def _by_function(samples: Sequence[Sample]) -> tuple[Float[Tensor, "K B"], Float[Tensor, "K"]]:
    """Return what each function of weight other than 0 gave each sample, and the weights; NaN: it does not apply."""
    scores = [sample.score for sample in samples]
    weights = next((score.weights for score in scores if score is not None), {})
    parts = [
        float("nan") if score is None or score.reward is None or (part := score.parts[name]) is None else part
        for name in weights
        for score in scores
    ]
    rewards = torch.tensor(parts, dtype=torch.float64).view(len(weights), len(scores))
    return rewards, torch.tensor(list(weights.values()), dtype=torch.float64)


def _with_gae(batch: Batch, critic: CriticConfig, actor: ActorConfig) -> Batch:
    """PPO's advantages and returns, from the values of a value model."""
    samples = [sample for sample in batch.samples if sample.reward is not None]
    if not samples:
        return batch
    lengths = torch.tensor([sample.num_written for sample in samples])
    advantages, returns = advantages_and_returns(
        torch.cat([_rewards(sample, actor, by_token=True) for sample in samples]),
        torch.cat([sample.values.double() for sample in samples if sample.values is not None]),
        lengths,
        gamma=critic.gae_gamma,
        lam=critic.gae_lambda,
    )
    if critic.whiten:
        trained = torch.tensor([not sample.masked for sample in samples]).repeat_interleave(lengths)
        advantages = whitened(advantages, trained)
    rows = zip(samples, advantages.split(lengths.tolist()), returns.split(lengths.tolist()), strict=True)
    return batch.with_changed(
        {s: replace(_with_advantage(s, piece), returns=to_come.float()) for s, piece, to_come in rows}
    )


def _with_teacher(batch: Batch, teacher: TeacherConfig) -> Batch:
    """Each token's advantage with the teacher's beside it, as the recipe weighs the two."""
    taught = dict[Sample, Sample]()
    for sample in batch.samples:
        if sample.teacher_logprobs is None:
            continue
        own = torch.tensor(sample.advantage) if sample.token_advantages is None else sample.token_advantages
        # Of the policy that sampled the token; by the update's ratio it is that of π_old and π_θ.
        gap = distillation_advantages(sample.engine_logprobs.double(), sample.teacher_logprobs.double())
        advantages = teacher.advantage_weight * own.double() + teacher.coefficient * gap
        taught[sample] = _with_advantage(sample, advantages)
    return batch.with_changed(taught)


def _with_advantages(batch: Batch, advantages: Iterable[Float[Tensor, "_"]]) -> Batch:
    """Return each sample with its own of the advantages."""
    pieces = zip(batch.samples, advantages, strict=True)
    return batch.with_changed({sample: _with_advantage(sample, piece) for sample, piece in pieces})


def _with_advantage(sample: Sample, advantages: Float[Tensor, "_"]) -> Sample:
    """A sample with one advantage for the whole or one for each token; one that is masked gets none."""
    by_token = advantages.float() if len(advantages) > 1 and not sample.masked else None
    return replace(sample, advantage=0.0 if sample.masked else float(advantages.mean()), token_advantages=by_token)
