"""Advantages (Eq. 7) against the standard library's statistics, and what they must not depend on."""

import math
import random
import statistics

import pytest
import torch

from gspo.objective import group_advantages

NOT_SCORED = float("nan")


def advantages(rewards: list[float], ids: list[int], dtype: torch.dtype = torch.float64) -> list[float]:
    return group_advantages(torch.tensor(rewards, dtype=dtype), torch.tensor(ids)).tolist()


def expected_advantages(rewards: list[float], ids: list[int]) -> list[float]:
    groups = {i: [r for r, j in zip(rewards, ids, strict=True) if i == j and not math.isnan(r)] for i in ids}
    return [
        0.0
        if math.isnan(reward) or len(set(groups[i])) < 2
        else (reward - statistics.fmean(groups[i])) / statistics.stdev(groups[i])
        for reward, i in zip(rewards, ids, strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_deviations_in_units_of_the_sample_deviation(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.choice([3, 70, 5, 12, -4]) for _ in range(60)]  # not contiguous, of unequal size
    rewards = [rng.choice([rng.gauss(0, 1), 1.0, 0.0, NOT_SCORED]) for _ in ids]
    assert advantages(rewards, ids) == pytest.approx(expected_advantages(rewards, ids), rel=1e-9, abs=1e-12)


def test_two_rewards_are_apart_by_the_square_root_of_two() -> None:
    # The sample form (n-1): the population form would give ±1.
    assert advantages([1.0, 0.0], [0, 0]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -0.7, 1e6 + 0.1, 1e-12])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_equal_rewards_have_advantage_exactly_zero(reward: float, count: int, dtype: torch.dtype) -> None:
    # The mean of three 0.1 is not 0.1 in floating point: a rounded deviation must not be blown up to ±1.
    assert advantages([reward] * count, [5] * count, dtype) == [0.0] * count


def test_equal_rewards_beside_an_unscored_one_have_advantage_exactly_zero() -> None:
    assert advantages([0.1, NOT_SCORED, 0.1, 0.1], [0] * 4) == [0.0] * 4


def test_an_unscored_reward_takes_no_part_in_its_group() -> None:
    with_unscored = advantages([1.0, NOT_SCORED, 0.0, 0.5, NOT_SCORED], [0] * 5)
    assert [with_unscored[i] for i in (0, 2, 3)] == pytest.approx(advantages([1.0, 0.0, 0.5], [0] * 3))
    assert [with_unscored[i] for i in (1, 4)] == [0.0, 0.0]


def test_a_group_without_any_score_is_zero_and_leaves_the_others_alone() -> None:
    found = advantages([NOT_SCORED, 1.0, NOT_SCORED, 0.0], [0, 1, 0, 1])
    assert found == pytest.approx([0.0, math.sqrt(0.5), 0.0, -math.sqrt(0.5)])


def test_a_lone_score_in_a_group_is_zero() -> None:
    assert advantages([1.0, NOT_SCORED], [0, 0]) == [0.0, 0.0]


@pytest.mark.parametrize(("scale", "shift"), [(3.0, 0.0), (1.0, -40.0), (0.01, 7.0)])
def test_rewards_may_be_shifted_and_scaled(scale: float, shift: float) -> None:
    rng = random.Random(0)
    rewards, ids = [rng.gauss(0, 1) for _ in range(30)], [n % 4 for n in range(30)]
    changed = [scale * reward + shift for reward in rewards]
    assert advantages(changed, ids) == pytest.approx(advantages(rewards, ids), rel=1e-8)
    flipped = [-reward for reward in rewards]
    assert advantages(flipped, ids) == pytest.approx([-a for a in advantages(rewards, ids)], rel=1e-8)


def test_groups_do_not_leak_into_each_other() -> None:
    before = advantages([1.0, 0.0, 0.5, 2.0, 0.0], [9, 2, 9, 2, 9])
    after = advantages([1.0, 50.0, 0.5, -3.0, 0.0], [9, 2, 9, 2, 9])
    assert [before[i] for i in (0, 2, 4)] == [after[i] for i in (0, 2, 4)]
    assert [before[i] for i in (1, 3)] != [after[i] for i in (1, 3)]


def test_the_order_of_the_rollouts_does_not_matter() -> None:
    rng = random.Random(1)
    rewards, ids = [rng.gauss(0, 1) for _ in range(20)], [n % 3 for n in range(20)]
    order = rng.sample(range(20), 20)
    shuffled = advantages([rewards[i] for i in order], [ids[i] for i in order])
    expected = advantages(rewards, ids)
    assert shuffled == pytest.approx([expected[i] for i in order], rel=1e-12)


def test_every_varied_group_has_mean_zero_and_unit_deviation() -> None:
    found = advantages([3.0, 1.0, 0.0, 0.0, 0.25, 9.0, 1.0], [0, 0, 0, 1, 1, 1, 1])
    for group in (found[:3], found[3:]):
        assert statistics.fmean(group) == pytest.approx(0, abs=1e-12)
        assert statistics.stdev(group) == pytest.approx(1)
