"""Batches: the advantages that a recipe asks for, against plain loops, and who takes part in the loss."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gspo.learner.batch import make_batch, rewards_differ
from gspo.learner.old_policy import old_policy
from gspo.learner.update import update
from gspo.model.packing import TokenSequence
from gspo.objective import group_advantages, token_advantages
from gspo.recipe.schema import ActorConfig, CriticConfig, RolloutConfig
from gspo.types import Appraisal, Batch, Group, Rollout, Score

LENGTHS = [[3, 1, 4], [2, 5, 1]]
REWARDS: list[list[float | None]] = [[1.0, 0.25, None], [0.5, 0.0, 2.0]]
TOKEN = {"importance_sampling_level": "token"}


def drawn(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def groups(query_of: Any) -> list[Group]:
    """Of LENGTHS; the second and the fourth response are cut off."""
    found, number = [], 0
    for place, lengths in enumerate(LENGTHS):
        rollouts = []
        for length in lengths:
            rollouts.append(
                Rollout(
                    response_ids=torch.arange(3, 3 + length),
                    text="",
                    sampler_logprobs=drawn(length, number) - 2,
                    finish_reason="length" if number in (1, 3) else "stop",
                    policy_version=0,
                )
            )
            number += 1
        found.append(Group(query=query_of([4, 5 + place], place), rollouts=tuple(rollouts)))
    return found


SCORES = [Score(reward=reward, parts={}) for group in REWARDS for reward in group]
FLAT, SCORED = [reward for group in REWARDS for reward in group], [0, 1, 3, 4, 5]
ALL_LENGTHS = [length for group in LENGTHS for length in group]
APPRAISAL = Appraisal(
    reference_logprobs={index: drawn(ALL_LENGTHS[index], 50 + index) - 2 for index in SCORED},
    values={index: drawn(ALL_LENGTHS[index], 80 + index) for index in SCORED},
)


def kl(estimator: str, logprobs: Sequence[float], reference: Sequence[float]) -> list[float]:
    gaps = [p - q for p, q in zip(logprobs, reference, strict=True)]
    forms = {"k1": lambda gap: gap, "k2": lambda gap: gap * gap / 2, "k3": lambda gap: math.exp(-gap) - 1 + gap}
    return [forms[estimator](gap) for gap in gaps]


def plain_gae(groups: Sequence[Group], gamma: float, lam: float, coefficient: float) -> tuple[Any, Any]:
    """Advantages as the sum over all later errors, returns as advantage plus value; lists of numbers."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    advantages, returns = {}, {}
    for index in SCORED:
        rewards = [0.0] * (ALL_LENGTHS[index] - 1) + [float(FLAT[index] or 0.0)]
        its = rollouts[index].sampler_logprobs.tolist()
        penalties = kl("k3", its, APPRAISAL.reference_logprobs[index].tolist())
        rewards = [reward - coefficient * penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        values = [*APPRAISAL.values[index].tolist(), 0.0]
        errors = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        advantages[index] = [
            sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))
        ]
        returns[index] = [a + v for a, v in zip(advantages[index], values[:-1], strict=True)]
    return advantages, returns


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_gae_is_that_of_plain_loops(
    gamma: float, lam: float, whiten: bool, coefficient: float, groups: Any, actor_of: Any
) -> None:
    actor = actor_of(advantage="gae", kl={"coefficient": coefficient, "place": "reward"}, **TOKEN)
    critic = CriticConfig(gae_gamma=gamma, gae_lambda=lam, whiten=whiten)
    batch = make_batch(groups, SCORES, actor, critic=critic, appraisal=APPRAISAL)
    advantages, returns = plain_gae(groups, gamma, lam, coefficient)
    everything = [one for its in advantages.values() for one in its]
    mean, std = (statistics.fmean(everything), statistics.stdev(everything)) if whiten else (0.0, 1.0)
    assert set(batch.returns) == set(SCORED)
    for index in SCORED:
        expected = [(one - mean) / std for one in advantages[index]]
        found = batch.token_advantages[index].tolist() if len(expected) > 1 else [batch.advantages[index]]
        assert found == pytest.approx(expected, abs=1e-5)
        assert batch.advantages[index] == pytest.approx(statistics.fmean(expected), abs=1e-5)
        assert batch.returns[index].tolist() == pytest.approx(returns[index], abs=1e-5)
    assert batch.advantages[2] == 0 and not batch.token_advantages[2].any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", ["group", "group_mean", "leave_one_out", "batch"])
def test_kl_in_the_reward_is_summed_over_the_response_before_groups_are_compared(
    kind: Any, estimator: str, groups: Any, actor_of: Any
) -> None:
    actor = actor_of(advantage=kind, kl={"coefficient": 0.1, "estimator": estimator, "place": "reward"})
    batch = make_batch(groups, SCORES, actor, appraisal=APPRAISAL)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [math.nan] * 6
    for index in SCORED:
        its = rollouts[index].sampler_logprobs.tolist()
        rewards[index] = FLAT[index] - 0.1 * sum(kl(estimator, its, APPRAISAL.reference_logprobs[index].tolist()))  # type: ignore[operator]
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    expected = group_advantages(torch.tensor(rewards, dtype=torch.float64), ids, kind=kind)
    assert list(batch.advantages) == pytest.approx(expected.tolist(), abs=1e-6)
    assert batch.token_advantages == {} and [score.reward for score in batch.scores] == FLAT
    elsewhere = actor_of(advantage=kind, kl={"coefficient": 0.1, "estimator": "k2", "place": "loss"})
    plain = make_batch(groups, SCORES, actor_of(advantage=kind))
    assert make_batch(groups, SCORES, elsewhere, appraisal=APPRAISAL).advantages == plain.advantages


def mask() -> RolloutConfig:
    return RolloutConfig(overlong="mask")


def test_a_masked_response_is_part_of_its_groups_mean_but_not_of_the_loss(groups: Any, actor_of: Any) -> None:
    batch, plain = make_batch(groups, SCORES, actor_of(), sampling=mask()), make_batch(groups, SCORES, actor_of())
    assert batch.masked == {1, 3} and plain.masked == frozenset()
    expected = [0.0 if index in (1, 3) else one for index, one in enumerate(plain.advantages)]
    assert list(batch.advantages) == expected and all(plain.advantages[index] for index in (1, 3))
    assert batch.scores == plain.scores
    by_token = [
        Score(reward=0.5, parts={}, token_rewards=drawn(length, index)) for index, length in enumerate(ALL_LENGTHS)
    ]
    batch = make_batch(groups, by_token, actor_of(**TOKEN), sampling=mask())
    assert set(batch.token_advantages) == {0, 2, 4}  # those of one token have no use for it


@pytest.mark.parametrize("overlong", ["keep", "penalty"])
def test_nothing_is_masked_elsewhere(overlong: Any, groups: Any, actor_of: Any) -> None:
    assert make_batch(groups, SCORES, actor_of(), sampling=RolloutConfig(overlong=overlong)).masked == frozenset()


@pytest.mark.parametrize("settings", [{}, {"entropy_bonus": 0.1}, {"kl": {"coefficient": 0.1, "estimator": "k2"}}])
def test_the_gradient_with_masked_responses_is_that_of_a_loss_written_by_hand(
    settings: Any, groups: Any, new_policy: Any, actor_of: Any, recording_optimizer: Any, plain_logprobs: Any
) -> None:
    policy, reference = new_policy(), APPRAISAL.reference_logprobs
    actor = actor_of(clip_low=0.5, clip_high=0.5, **settings)
    batch: Batch = make_batch(groups, SCORES, actor, sampling=mask(), appraisal=APPRAISAL)
    old = old_policy(policy, batch, actor, temperature=1.0)
    (report,) = update(policy, recording_optimizer(policy.model), batch, old, actor, temperature=1.0)
    # Index 2 is not scored; of 0, 4 and 5, which take part, those with an advantage train, or all with such a term.
    assert sorted(item.index for item in report.trained) == [0, 4, 5]
    loss = torch.zeros(())
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    for index, (group, rollout) in enumerate(pairs):
        if index not in (0, 4, 5):
            continue
        sequence = TokenSequence(prompt_ids=group.query.prompt_ids, response_ids=rollout.response_ids)
        logprobs = plain_logprobs(policy, [sequence])
        loss = loss - batch.advantages[index] * logprobs.mean() / 3
        if "kl" in settings:
            loss = loss + 0.1 * ((logprobs - reference[index]) ** 2 / 2).mean() / 3
        if "entropy_bonus" in settings:
            ids = torch.tensor([[*sequence.prompt_ids, *rollout.response_ids.tolist()]])
            table = policy.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            entropy = -(table.exp() * table).sum(-1)[len(sequence.prompt_ids) - 1 : -1]
            loss = loss - 0.1 * entropy.mean() / 3
    policy.model.zero_grad()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    policy.model.zero_grad()
    (found,) = recording_optimizer.gradients
    assert (found - expected).norm() / expected.norm() <= 1e-4


def test_rewards_that_the_mask_takes_out_of_the_loss_are_no_signal(groups: list[Group]) -> None:
    masking, lone = RolloutConfig(overlong="mask"), groups[0]
    cut_off = Group(
        query=lone.query, rollouts=tuple(dataclasses.replace(one, finish_reason="length") for one in lone.rollouts)
    )
    scores = [Score(reward=reward, parts={}) for reward in (1.0, 0.0, 0.0)]
    assert rewards_differ(lone, scores, masking)
    assert not rewards_differ(cut_off, scores, masking)
    assert rewards_differ(cut_off, scores)
    assert not rewards_differ(lone, [Score(reward=0.5, parts={})] * 3)


def penalised(rewards: Sequence[float], penalties: Sequence[float]) -> list[Score]:
    return [Score(reward=r + p, penalty=p, parts={}) for r, p in zip(rewards, penalties, strict=True)]


def test_a_penalty_for_length_alone_is_no_signal_and_is_not_blown_up(groups: list[Group], actor_of: Any) -> None:
    """Eight right answers, one of them a token into the margin: it had an advantage of -2.475 (DAPO, Eq. 11)."""
    lone = dataclasses.replace(groups[0], rollouts=groups[0].rollouts[:1] * 8)
    right = penalised([1.0] * 8, [0.0] * 7 + [-0.005])
    assert not rewards_differ(lone, right)
    for kind in ("group", "batch"):
        assert make_batch([lone], right, actor_of(advantage=kind)).advantages == (0.0,) * 8
    apart = make_batch([lone], right, actor_of(advantage="group_mean")).advantages  # in the penalty's own units
    assert apart[-1] == pytest.approx(-0.005 * 7 / 8) and apart[0] == pytest.approx(0.005 / 8)


def test_where_answers_differ_the_penalty_counts(groups: list[Group], actor_of: Any) -> None:
    lone, scores = groups[0], penalised([1.0, 1.0, 0.0], [-0.5, 0.0, 0.0])
    assert rewards_differ(lone, scores)
    expected = group_advantages(torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64), torch.zeros(3, dtype=torch.long))
    assert list(make_batch([lone], scores, actor_of()).advantages) == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_penalty_that_makes_unequal_answers_equal_does_not_hide_them(groups: list[Group]) -> None:
    assert rewards_differ(groups[0], penalised([1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]))


def test_rewards_of_segments_are_discounted_and_compared_segment_by_segment(groups: Any, actor_of: Any) -> None:
    places = [torch.arange(length) // 2 for length in ALL_LENGTHS]
    earned = [drawn(length, index).double() for index, length in enumerate(ALL_LENGTHS)]
    scores = [
        Score(reward=0.5, parts={}, token_rewards=own, places=its) for own, its in zip(earned, places, strict=True)
    ]
    batch = make_batch(groups, scores, actor_of(advantage="group_mean", discount=0.5, **TOKEN))
    expected = token_advantages(
        torch.cat(earned),
        torch.tensor(ALL_LENGTHS),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        kind="group_mean",
        places=torch.cat(places),
        discount=0.5,
    )
    for index, own in enumerate(expected.split(ALL_LENGTHS)):
        found = batch.token_advantages.get(index, torch.tensor([batch.advantages[index]]))
        assert found.tolist() == pytest.approx(own.tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", ["group_mean", "leave_one_out", "batch"])
def test_kl_in_the_reward_of_tokens_counts_from_each_token_on(kind: Any, groups: Any, actor_of: Any) -> None:
    actor = actor_of(advantage=kind, kl={"coefficient": 0.1, "estimator": "k1", "place": "reward"}, **TOKEN)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    earned = [drawn(length, index).double() for index, length in enumerate(ALL_LENGTHS)]
    scores = [Score(reward=0.5, parts={}, token_rewards=own) for own in earned]
    reference = {index: drawn(length, 50 + index) - 2 for index, length in enumerate(ALL_LENGTHS)}
    batch = make_batch(groups, scores, actor, appraisal=Appraisal(reference_logprobs=reference))
    lowered = [
        own - 0.1 * torch.tensor(kl("k1", rollout.sampler_logprobs.tolist(), reference[index].tolist()))
        for index, (own, rollout) in enumerate(zip(earned, rollouts, strict=True))
    ]
    ids, lengths = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor(ALL_LENGTHS)
    expected = token_advantages(torch.cat(lowered), lengths, ids, kind=kind).split(ALL_LENGTHS)
    for index, own in enumerate(expected):
        found = batch.token_advantages.get(index, torch.tensor([batch.advantages[index]]))
        assert found.tolist() == pytest.approx(own.tolist(), abs=1e-5)


def test_masked_responses_have_no_say_in_the_whitening(groups: list[Group]) -> None:
    actor = ActorConfig(surrogate="ppo")
    settings = CriticConfig()
    rest = [index for index in SCORED if index not in (1, 3)]
    made = make_batch(
        groups, SCORES, actor, sampling=RolloutConfig(overlong="mask"), critic=settings, appraisal=APPRAISAL
    )
    everything = torch.cat([made.token_advantages.get(index, torch.tensor([made.advantages[index]])) for index in rest])
    assert float(everything.mean()) == pytest.approx(0, abs=1e-6)
    assert float(everything.std()) == pytest.approx(1)
    assert made.advantages[1] == made.advantages[3] == 0
