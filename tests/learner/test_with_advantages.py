"""Batches: the advantages that a recipe asks for, against plain loops, and who takes part in the loss."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.samples import (
    advantaged,
    advantages_of,
    changed,
    learner_of,
    query_of,
    sample_of,
    scored,
    sequence_of,
    token_advantages_of,
    updates,
)

from gspo.errors import UserError
from gspo.learner.advantages import rewards_differ, with_advantages
from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.loss import denominators_of
from gspo.objective import group_advantages, normalize_then_sum, token_advantages, turn_advantages
from gspo.recipe.sections import ActorConfig, CriticConfig, RolloutConfig, TeacherConfig
from gspo.types import Batch, Group, Score, Turn

LENGTHS = [[3, 1, 4], [2, 5, 1]]
REWARDS: list[list[float | None]] = [[1.0, 0.25, None], [0.5, 0.0, 2.0]]
TOKEN = {"importance_sampling_level": "token"}


def drawn(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def groups() -> list[Group]:
    """Of LENGTHS; the second and the fourth response are cut off."""
    groups, number = [], 0
    for place, lengths in enumerate(LENGTHS):
        samples = []
        for length in lengths:
            reason = "length" if number in (1, 3) else "stop"
            query, ids = query_of([4, 5 + place], place), torch.arange(3, 3 + length)
            samples.append(sample_of(query, ids, sampler_logprobs=drawn(length, number) - 2, finish_reason=reason))
            number += 1
        groups.append(Group(samples=tuple(samples)))
    return groups


SCORES = [Score(reward=reward, parts={}) for group in REWARDS for reward in group]
FLAT, SCORED = [reward for group in REWARDS for reward in group], [0, 1, 3, 4, 5]
ALL_LENGTHS = [length for group in LENGTHS for length in group]
REFERENCE = [drawn(length, 50 + index) - 2 if index in SCORED else None for index, length in enumerate(ALL_LENGTHS)]
VALUES = [drawn(length, 80 + index) if index in SCORED else None for index, length in enumerate(ALL_LENGTHS)]


def appraised(groups: Sequence[Group]) -> Batch:
    """With the scores, and with what a reference and a value model say of the scored samples."""
    return changed(scored(groups, SCORES), reference_logprobs=REFERENCE, values=VALUES)


def reference_of(index: int) -> torch.Tensor:
    logprobs = REFERENCE[index]
    assert logprobs is not None
    return logprobs


def kl(estimator: str, logprobs: Sequence[float], reference: Sequence[float]) -> list[float]:
    gaps = [p - q for p, q in zip(logprobs, reference, strict=True)]
    forms = {"k1": lambda gap: gap, "k2": lambda gap: gap * gap / 2, "k3": lambda gap: math.exp(-gap) - 1 + gap}
    return [forms[estimator](gap) for gap in gaps]


def plain_gae(groups: Sequence[Group], gamma: float, lam: float, coefficient: float) -> tuple[Any, Any]:
    """Advantages as the sum over all later errors, returns as advantage plus value; lists of numbers."""
    samples = appraised(groups).samples
    advantages, returns = {}, {}
    for index in SCORED:
        rewards = [0.0] * (ALL_LENGTHS[index] - 1) + [float(FLAT[index] or 0.0)]
        penalties = kl("k3", samples[index].sampler_logprobs.tolist(), reference_of(index).tolist())
        rewards = [reward - coefficient * penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        values = [*VALUES[index].tolist(), 0.0]  # type: ignore[union-attr]
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
    samples = with_advantages(appraised(groups), actor, critic=critic).samples
    advantages, returns = plain_gae(groups, gamma, lam, coefficient)
    everything = [one for its in advantages.values() for one in its]
    mean, std = (statistics.fmean(everything), statistics.stdev(everything)) if whiten else (0.0, 1.0)
    assert [index for index, sample in enumerate(samples) if sample.returns is not None] == SCORED
    for index in SCORED:
        expected = [(one - mean) / std for one in advantages[index]]
        assert token_advantages_of(samples[index]).tolist() == pytest.approx(expected, abs=1e-5)
        assert samples[index].advantage == pytest.approx(statistics.fmean(expected), abs=1e-5)
        assert samples[index].returns.tolist() == pytest.approx(returns[index], abs=1e-5)  # type: ignore[union-attr]
    assert samples[2].advantage == 0 and not samples[2].has_advantage


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", ["group", "group_mean", "leave_one_out", "batch"])
def test_kl_in_the_reward_is_summed_over_the_response_before_groups_are_compared(
    kind: Any, estimator: str, groups: Any, actor_of: Any
) -> None:
    actor = actor_of(advantage=kind, kl={"coefficient": 0.1, "estimator": estimator, "place": "reward"})
    batch = with_advantages(appraised(groups), actor)
    rewards = [math.nan] * 6
    for index in SCORED:
        own = batch.samples[index].sampler_logprobs.tolist()
        rewards[index] = FLAT[index] - 0.1 * sum(kl(estimator, own, reference_of(index).tolist()))  # type: ignore[operator]
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    expected = group_advantages(torch.tensor(rewards, dtype=torch.float64), ids, kind=kind)
    assert advantages_of(batch) == pytest.approx(expected.tolist(), abs=1e-6)
    assert all(sample.token_advantages is None for sample in batch.samples)
    assert [sample.reward for sample in batch.samples] == FLAT
    drawn_from_q = {name: [s.sampler_logprobs + more for s in batch.samples] for name, more in Q_AND_PI}
    assert advantages_of(with_advantages(changed(appraised(groups), **drawn_from_q), actor)) == advantages_of(batch)
    elsewhere = actor_of(advantage=kind, kl={"coefficient": 0.1, "estimator": "k2", "place": "loss"})
    plain = advantaged(groups, SCORES, actor_of(advantage=kind))
    assert advantages_of(with_advantages(appraised(groups), elsewhere)) == advantages_of(plain)


@pytest.mark.parametrize(("coefficient", "weight"), [(1.0, 1.0), (0.3, 2.0), (0.5, 0.0)])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_teachers_advantage_stands_beside_the_rewards_at_each_token(
    coefficient: float, weight: float, by_token: bool, groups: Any, actor_of: Any
) -> None:
    actor, teacher = actor_of(**TOKEN), TeacherConfig(path="t", coefficient=coefficient, advantage_weight=weight)
    scores: list[Any] = list(FLAT)
    if by_token:
        rewards = [drawn(length, 50 + n).double() for n, length in enumerate(ALL_LENGTHS)]
        scores = [
            None if flat is None else Score(reward=float(own.sum()), parts={}, token_rewards=own)
            for flat, own in zip(FLAT, rewards, strict=True)
        ]
    plain = advantaged(groups, scores, actor, sampling=mask()).samples
    said = [None if n == 2 else drawn(length, 90 + n) for n, length in enumerate(ALL_LENGTHS)]
    batch = changed(scored(groups, scores), teacher_logprobs=said, **q_and_pi_of(groups))
    taught = with_advantages(batch, actor, sampling=mask(), teacher=teacher).samples
    for n, (before, sample) in enumerate(zip(plain, taught, strict=True)):
        if n == 2 or sample.masked:
            assert not sample.has_advantage
            continue
        own = token_advantages_of(before).tolist()
        own = own if len(own) == ALL_LENGTHS[n] else own * ALL_LENGTHS[n]
        pi, teachers = sample.engine_logprobs.tolist(), said[n].tolist()  # type: ignore[union-attr]
        expected = [weight * a + coefficient * (t - q) for a, t, q in zip(own, teachers, pi, strict=True)]
        assert token_advantages_of(sample).tolist() == pytest.approx(expected, abs=1e-6)
        assert sample.advantage == pytest.approx(statistics.fmean(expected), abs=1e-6)
        assert sample.reward == before.reward


def test_without_a_teacher_what_it_said_counts_for_nothing(groups: Any, actor_of: Any) -> None:
    batch = changed(scored(groups, FLAT), teacher_logprobs=[drawn(length, 5) for length in ALL_LENGTHS])
    plain = advantages_of(with_advantages(batch, actor_of()))
    assert advantages_of(with_advantages(batch, actor_of(), teacher=TeacherConfig())) == plain


def q_and_pi_of(groups: Any) -> dict[str, Any]:
    return {name: [s.sampler_logprobs + more for group in groups for s in group.samples] for name, more in Q_AND_PI}


Q_AND_PI = (("sampler_logprobs", 0.3), ("full_logprobs", 0.0))  # the KL is that of π, whatever q tokens are drawn from


def mask() -> RolloutConfig:
    return RolloutConfig(overlong="mask")


def test_a_masked_response_is_part_of_its_groups_mean_but_not_of_the_loss(groups: Any, actor_of: Any) -> None:
    batch, plain = (advantaged(groups, SCORES, actor_of(), sampling=sampling) for sampling in (mask(), None))
    assert [sample.masked for sample in batch.samples] == [index in (1, 3) for index in range(6)]
    assert not any(sample.masked for sample in plain.samples)
    expected = [0.0 if index in (1, 3) else own for index, own in enumerate(advantages_of(plain))]
    assert advantages_of(batch) == expected and all(plain.samples[index].advantage for index in (1, 3))
    assert [sample.score for sample in batch.samples] == [sample.score for sample in plain.samples]
    by_token = [
        Score(reward=0.5, parts={}, token_rewards=drawn(length, index)) for index, length in enumerate(ALL_LENGTHS)
    ]
    batch = advantaged(groups, by_token, actor_of(**TOKEN), sampling=mask())
    differing = [index for index, sample in enumerate(batch.samples) if sample.token_advantages is not None]
    assert differing == [0, 2, 4]  # those of one token have no use for it


@pytest.mark.parametrize("overlong", ["keep", "penalty"])
def test_nothing_is_masked_elsewhere(overlong: Any, groups: Any, actor_of: Any) -> None:
    batch = advantaged(groups, SCORES, actor_of(), sampling=RolloutConfig(overlong=overlong))
    assert not any(sample.masked for sample in batch.samples)


@pytest.mark.parametrize("settings", [{}, {"entropy_bonus": 0.1}, {"kl": {"coefficient": 0.1, "estimator": "k2"}}])
def test_the_gradient_with_masked_responses_is_that_of_a_loss_written_by_hand(
    settings: Any, groups: Any, new_policy: Any, actor_of: Any, recording_optimizer: Any, plain_logprobs: Any
) -> None:
    policy = new_policy()
    actor = actor_of(clip_low=0.5, clip_high=0.5, **settings)
    batch = with_advantages(appraised(groups), actor, sampling=mask())
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    (step,) = updates(policy, recording_optimizer(policy.model), batch, actor)
    # Index 2 is not scored; of 0, 4 and 5, which take part, those with an advantage train, or all with such a term.
    assert list(step.trained) == [0, 4, 5]
    loss = torch.zeros(())
    for index in step.trained:
        sequence = sequence_of(batch.samples[index])
        logprobs = plain_logprobs(policy, [sequence])
        loss = loss - batch.samples[index].advantage * logprobs.mean() / 3
        if "kl" in settings:
            loss = loss + 0.1 * ((logprobs - reference_of(index)) ** 2 / 2).mean() / 3
        if "entropy_bonus" in settings:
            ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids.tolist()]])
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
    masking, lone = RolloutConfig(overlong="mask"), group_with(groups[0], [1.0, 0.0, 0.0])
    cut_off = Group(samples=tuple(dataclasses.replace(sample, finish_reason="length") for sample in lone.samples))
    assert rewards_differ([lone], masking) == [True]
    assert rewards_differ([cut_off], masking) == [False]
    assert rewards_differ([cut_off]) == [True]
    assert rewards_differ([group_with(groups[0], [0.5] * 3)]) == [False]


def group_with(group: Group, scores: Sequence[Any]) -> Group:
    return scored([group], scores).groups[0]


def penalised(rewards: Sequence[float], penalties: Sequence[float]) -> list[Score]:
    return [Score(reward=r + p, penalty=p, parts={}) for r, p in zip(rewards, penalties, strict=True)]


def test_a_penalty_for_length_alone_is_no_signal_and_is_not_blown_up(groups: list[Group], actor_of: Any) -> None:
    """Eight right answers, one of them a token into the margin: it had an advantage of -2.475 (DAPO, Eq. 11)."""
    lone = Group(samples=groups[0].samples[:1] * 8)
    right = penalised([1.0] * 8, [0.0] * 7 + [-0.005])
    assert rewards_differ([group_with(lone, right)]) == [False]
    for kind in ("group", "batch"):
        assert advantages_of(advantaged([lone], right, actor_of(advantage=kind))) == [0.0] * 8
    apart = advantages_of(advantaged([lone], right, actor_of(advantage="group_mean")))  # in the penalty's own units
    assert apart[-1] == pytest.approx(-0.005 * 7 / 8) and apart[0] == pytest.approx(0.005 / 8)


def test_where_answers_differ_the_penalty_counts(groups: list[Group], actor_of: Any) -> None:
    lone, scores = groups[0], penalised([1.0, 1.0, 0.0], [-0.5, 0.0, 0.0])
    assert rewards_differ([group_with(lone, scores)]) == [True]
    expected = group_advantages(torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64), torch.zeros(3, dtype=torch.long))
    assert advantages_of(advantaged([lone], scores, actor_of())) == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_penalty_that_makes_unequal_answers_equal_does_not_hide_them(groups: list[Group]) -> None:
    assert rewards_differ([group_with(groups[0], penalised([1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]))]) == [True]


def test_rewards_of_segments_are_discounted_and_compared_segment_by_segment(groups: Any, actor_of: Any) -> None:
    places = [torch.arange(length) // 2 for length in ALL_LENGTHS]
    earned = [drawn(length, index).double() for index, length in enumerate(ALL_LENGTHS)]
    scores = [
        Score(reward=0.5, parts={}, token_rewards=own, places=its) for own, its in zip(earned, places, strict=True)
    ]
    batch = advantaged(groups, scores, actor_of(advantage="group_mean", discount=0.5, **TOKEN))
    expected = token_advantages(
        torch.cat(earned),
        torch.tensor(ALL_LENGTHS),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        kind="group_mean",
        places=torch.cat(places),
        discount=0.5,
    )
    for index, own in enumerate(expected.split(ALL_LENGTHS)):
        assert token_advantages_of(batch.samples[index]).tolist() == pytest.approx(own.tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", ["group_mean", "leave_one_out", "batch"])
def test_kl_in_the_reward_of_tokens_counts_from_each_token_on(kind: Any, groups: Any, actor_of: Any) -> None:
    actor = actor_of(advantage=kind, kl={"coefficient": 0.1, "estimator": "k1", "place": "reward"}, **TOKEN)
    earned = [drawn(length, index).double() for index, length in enumerate(ALL_LENGTHS)]
    scores = [Score(reward=0.5, parts={}, token_rewards=own) for own in earned]
    reference = [drawn(length, 50 + index) - 2 for index, length in enumerate(ALL_LENGTHS)]
    batch = with_advantages(changed(scored(groups, scores), reference_logprobs=reference), actor)
    lowered = [
        own - 0.1 * torch.tensor(kl("k1", sample.sampler_logprobs.tolist(), theirs.tolist()))
        for own, sample, theirs in zip(earned, batch.samples, reference, strict=True)
    ]
    ids, lengths = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor(ALL_LENGTHS)
    expected = token_advantages(torch.cat(lowered), lengths, ids, kind=kind).split(ALL_LENGTHS)
    for index, own in enumerate(expected):
        assert token_advantages_of(batch.samples[index]).tolist() == pytest.approx(own.tolist(), abs=1e-5)


def test_masked_responses_have_no_say_in_the_whitening(groups: list[Group]) -> None:
    actor = ActorConfig(surrogate="ppo")
    settings = CriticConfig()
    rest = [index for index in SCORED if index not in (1, 3)]
    samples = with_advantages(appraised(groups), actor, sampling=mask(), critic=settings).samples
    everything = torch.cat([token_advantages_of(samples[index]) for index in rest])
    assert float(everything.mean()) == pytest.approx(0, abs=1e-6)
    assert float(everything.std()) == pytest.approx(1)
    assert samples[1].advantage == samples[3].advantage == 0


WEIGHTS = {"right": 1.0, "short": -0.5}
PARTS: list[dict[str, float | None]] = [
    {"right": 1.0, "short": 3.0, "watched": 9.0},
    {"right": 0.0, "short": None, "watched": 1.0},
    {"right": 1.0, "short": 5.0, "watched": 0.0},  # another function of this one has failed: no reward
    {"right": 1.0, "short": 2.0, "watched": 0.0},
    {"right": 1.0, "short": 2.5, "watched": 0.0},
    {"right": None, "short": None, "watched": 4.0},
]


def by_function(parts: Sequence[dict[str, float | None]], failed: Sequence[int] = ()) -> list[Score]:
    """Scores as the reward functions' stage makes them."""
    scores = []
    for index, own in enumerate(parts):
        terms = [weight * value for name, weight in WEIGHTS.items() if (value := own[name]) is not None]
        reward = sum(terms) if terms and index not in failed else None
        scores.append(Score(reward=reward, parts=own, weights=WEIGHTS))
    return scores


def test_each_function_is_compared_by_itself_where_the_recipe_says_so(groups: list[Group], actor_of: Any) -> None:
    nan, ids = math.nan, torch.tensor([0, 0, 0, 1, 1, 1])
    rewards = torch.tensor([[1, 0, nan, 1, 1, nan], [3, nan, nan, 2, 2.5, nan]], dtype=torch.float64)
    for ddof in (0, 1):
        actor = actor_of(reward_aggregation="normalize_then_sum", advantage_ddof=ddof)
        batch = advantaged(groups, by_function(PARTS, failed=[2]), actor, sampling=mask())
        expected = normalize_then_sum(rewards, torch.tensor([1.0, -0.5], dtype=torch.float64), ids, ddof=ddof)
        unmasked = [0.0 if index in (1, 3) else own for index, own in enumerate(expected.tolist())]
        assert advantages_of(batch) == pytest.approx(unmasked, abs=1e-12)
    assert advantages_of(batch)[0] and advantages_of(batch)[4] and advantages_of(batch)[5] == 0


def test_rewards_that_cancel_in_the_sum_are_signal_only_where_each_counts_by_itself(
    groups: list[Group], actor_of: Any
) -> None:
    apart: list[dict[str, float | None]] = [
        {"right": own, "short": 2 * own, "watched": 0.0}
        for own in (1.0, 0.0, 2.0)  # w·r sums to 0
    ]
    alone, by_itself = group_with(groups[0], by_function(apart)), actor_of(reward_aggregation="normalize_then_sum")
    assert rewards_differ([alone], actor=by_itself) == [True] and rewards_differ([alone], actor=actor_of()) == [False]
    same = group_with(groups[0], by_function([{"right": 1.0, "short": 2.0, "watched": 0.1 * n} for n in range(3)]))
    assert rewards_differ([same, alone], None, by_itself) == [False, True]
    failed = group_with(groups[0], [Score(reward=None, parts=dict.fromkeys(own), weights=WEIGHTS) for own in apart])
    assert rewards_differ([failed], None, by_itself) == [False]


def test_max_rl_refuses_a_negative_reward_before_anything_is_trained(groups: Any, actor_of: Any) -> None:
    actor = actor_of(advantage="max_rl")
    right_or_wrong = [Score(reward=None if index == 2 else float(index % 2), parts={}) for index in range(6)]
    assert advantages_of(with_advantages(scored(groups, right_or_wrong), actor))[1] == 1.0  # (1 - p)/p of p = ½
    below = [*right_or_wrong[:-1], Score(reward=-0.5, parts={})]
    with pytest.raises(UserError, match=r"one is -0\.5"):
        with_advantages(scored(groups, below), actor)


def turned(groups: list[Group], turns: list[list[tuple[int, float | None]]]) -> list[Group]:
    """The groups with turns: for each response how long each turn is that the policy wrote, and its reward."""
    own = iter(turns)
    return [
        Group(
            samples=tuple(
                dataclasses.replace(sample, turns=tuple(told) if len(told := turns_of(next(own))) > 1 else ())
                for sample in group.samples
            )
        )
        for group in groups
    ]


def turns_of(written: list[tuple[int, float | None]]) -> list[Turn]:
    turns: list[Turn] = []
    for size, reward in written:
        turns += [Turn(role="assistant", text="", num_tokens=size, reward=reward)]
        turns += [Turn(role="user", text="", num_tokens=7)]
    return turns[:-1]


BY_TURN: dict[str, Any] = {**TOKEN, "turn_credit": "return_to_go", "advantage": "leave_one_out"}
TURNS: list[list[tuple[int, float | None]]] = [
    [(2, 0.5), (1, 0.25)],
    [(1, None)],
    [(1, 1.0), (3, None)],
    [(1, 0.0), (1, -1.0)],
    [(2, 2.0), (1, 1.0), (2, 0.5)],
    [(1, None)],
]


@pytest.mark.parametrize("giver", ["environment", "agent"])
def test_each_turn_gets_credit_for_what_it_was_given_from_it_on(giver: str, groups: list[Group]) -> None:
    totals = [1.0, 0.25, 0.5, 0.5, 2.0, 2.0]  # of the response, by the giver of weight 2 and others
    scores = [Score(reward=reward, parts={}, weights={giver: 2.0, "other": 1.0}) for reward in totals]
    actor = ActorConfig(**BY_TURN, discount=0.5)
    batch = advantaged(turned(groups, TURNS), scores, actor)
    rewards = [[2 * (reward or 0.0) for _, reward in own] for own in TURNS]
    for earned, total in zip(rewards, totals, strict=True):
        earned[-1] = total - sum(earned[:-1])
    lengths, ids = torch.tensor([*map(len, TURNS)]), torch.tensor([0] * 3 + [1] * 3)
    by_turn = turn_advantages(
        torch.tensor([reward for earned in rewards for reward in earned]).double(), lengths, ids, discount=0.5
    )
    for sample, own, advantages in zip(batch.samples, TURNS, by_turn.split(lengths.tolist()), strict=True):
        expected = advantages.repeat_interleave(torch.tensor([size for size, _ in own])).float()
        found = sample.token_advantages
        assert (torch.tensor([sample.advantage]) if found is None else found).tolist() == pytest.approx(
            expected.tolist(), abs=1e-6
        )


def test_turns_of_contexts_that_interleave_are_paid_for_what_came_later(groups: list[Group]) -> None:
    """The policy wrote the third turn first, which is compared with the others' own; later ones have none."""
    turns: list[list[tuple[int, float | None]]] = [[(1, 10.0), (1, 1.0), (1, 5.0)], [(1, 0.0)], [(4, 0.0)]]
    (group,) = turned(groups[:1], turns)
    first = group.samples[0]
    written = [turn for turn in first.turns if turn.role == "assistant"]
    numbered = {
        id(turn): dataclasses.replace(turn, number=number) for turn, number in zip(written, (2, 3, 1), strict=True)
    }
    moved = dataclasses.replace(first, turns=tuple(numbered.get(id(turn), turn) for turn in first.turns))
    scores = [Score(reward=reward, parts={}, weights={"agent": 1.0}) for reward in (16.0, 0.0, 0.0)]
    batch = advantaged([Group(samples=(moved, *group.samples[1:]))], scores, ActorConfig(**BY_TURN))
    found = batch.samples[0].token_advantages
    assert found is not None and found.tolist() == pytest.approx([11.0, 1.0, 16.0])


def test_turns_that_earn_nothing_by_themselves_are_compared_with_responses_as_long(groups: list[Group]) -> None:
    actor = ActorConfig(**BY_TURN)
    batch = advantaged(turned(groups, TURNS), [1.0, 0.0, 0.5, None, 2.0, 1.0], actor)
    first, second = (sample.token_advantages for sample in (batch.samples[0], batch.samples[2]))
    assert first is not None and second is not None
    assert first.tolist() == pytest.approx([0.75, 0.75, 0.5])  # against 0 and 0.5, then against 0.5 alone
    assert second.tolist() == pytest.approx([0.0, -0.5, -0.5, -0.5])
    assert batch.samples[3].advantage == 0.0 and not batch.samples[3].takes_part


def test_a_divisor_by_turns_does_not_count_the_tokens_of_a_response(groups: list[Group]) -> None:
    batch = scored(turned(groups, TURNS), [1.0, 0.0, 0.5, None, 2.0, 1.0])
    found = denominators_of(batch.groups, "turns", 99)
    taking_part = [turns for index, turns in enumerate(TURNS) if index != 3]
    mean = sum(size for turns in taking_part for size, _ in turns) / sum(map(len, taking_part))
    assert [*found.tokens.values()] == pytest.approx([mean * len(turns) for turns in taking_part])


def test_groups_whose_turns_earn_different_rewards_are_something_to_learn_from(groups: list[Group]) -> None:
    turns: list[list[tuple[int, float | None]]] = [[(1, 1.0), (2, 0.0)], [(1, None)], [(2, 0.0), (2, 1.0)]]
    scores = [Score(reward=reward, parts={}, weights={"environment": 1.0}) for reward in (1.0, None, 1.0)]
    (group,) = scored(turned(groups[:1], turns), scores).groups
    assert rewards_differ([group], actor=ActorConfig(**BY_TURN)) == [True]
    assert rewards_differ([group]) == [False]
