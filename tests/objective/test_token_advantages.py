"""Every kind of advantage against plain loops, and rewards of one's own for every token."""

import math
import random
import statistics
from typing import Any

import pytest
import torch

from gspo.objective import group_advantages, token_advantages

KINDS = ["group", "group_mean", "leave_one_out", "batch"]
NOT_SCORED = float("nan")


def by_loops(rewards: list[list[float]], ids: list[int], kind: str, ddof: int) -> list[list[float]]:
    """Rewards of each response's tokens; a response weighs 1, a token 1/|y|."""
    scored = [i for i, own in enumerate(rewards) if not any(math.isnan(r) for r in own)]

    def spread(members: list[int]) -> float:
        centre = statistics.fmean(statistics.fmean(rewards[j]) for j in members)
        total = sum(statistics.fmean((r - centre) ** 2 for r in rewards[j]) for j in members)
        return math.sqrt(total / max(1, len(members) - ddof))

    found = []
    for i, own in enumerate(rewards):
        group = [j for j in scored if ids[j] == ids[i]]
        others = [j for j in group if j != i]
        if i not in scored or len({r for j in group for r in rewards[j]}) < 2:
            found.append([0.0] * len(own))
            continue
        around = others if kind == "leave_one_out" else group
        centre = statistics.fmean(statistics.fmean(rewards[j]) for j in around)
        scale = spread(group) if kind == "group" else spread(scored) if kind == "batch" else 1.0
        found.append([(r - centre) / scale for r in own])
    return found


def random_rewards(seed: int, *, per_token: bool) -> tuple[list[list[float]], list[int]]:
    """Unequal groups, not contiguous; some equal, some responses not scored. At least two scored a group."""
    rng = random.Random(seed)
    ids = [rng.choice([3, 70, 5, -4]) for _ in range(50)] + [8] * 6 + [9] * 4 + [3, 70, 5, -4] * 2
    rewards = []
    for i in ids:
        own = 0.1 if i == 8 else NOT_SCORED if i == 9 else rng.choice([rng.gauss(0, 1), 1.0, 0.0, NOT_SCORED])
        tokens = [own] * rng.randint(1, 5)
        if per_token and i not in (8, 9):
            tokens = [rng.gauss(0, 1) for _ in tokens]
            if math.isnan(own):  # a single one is enough
                tokens[rng.randrange(len(tokens))] = NOT_SCORED
        rewards.append(tokens)
    for place in range(-8, 0):
        rewards[place] = [rng.gauss(0, 1)] if not per_token else [rng.gauss(0, 1) for _ in range(3)]
    return rewards, ids


def of_tokens(rewards: list[list[float]], ids: list[int], kind: Any, ddof: int = 1) -> list[list[float]]:
    packed = torch.tensor([r for own in rewards for r in own], dtype=torch.float64)
    lengths = [len(own) for own in rewards]
    found = token_advantages(packed, torch.tensor(lengths), torch.tensor(ids), kind=kind, ddof=ddof)
    return [piece.tolist() for piece in found.split(lengths)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_reward_a_response_is_compared_as_the_loops_do(kind: Any, ddof: int, seed: int) -> None:
    rewards, ids = random_rewards(seed, per_token=False)
    alone = [own[:1] for own in rewards]
    expected = by_loops(alone, ids, kind, ddof)
    packed = torch.tensor([own[0] for own in alone], dtype=torch.float64)
    found = group_advantages(packed, torch.tensor(ids), kind=kind, ddof=ddof).tolist()
    assert found == pytest.approx([own[0] for own in expected], rel=1e-9, abs=1e-12)
    assert any(found) and 0.0 in found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_a_token_is_compared_as_the_loops_do(kind: Any, ddof: int, seed: int) -> None:
    rewards, ids = random_rewards(seed, per_token=True)
    expected = by_loops(rewards, ids, kind, ddof)
    for mine, theirs in zip(of_tokens(rewards, ids, kind, ddof), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_share_their_responses_reward_share_its_advantage(kind: Any, ddof: int) -> None:
    rewards, ids = random_rewards(2, per_token=False)
    packed = torch.tensor([own[0] for own in rewards], dtype=torch.float64)
    wanted = group_advantages(packed, torch.tensor(ids), kind=kind, ddof=ddof).tolist()
    for own, advantage in zip(of_tokens(rewards, ids, kind, ddof), wanted, strict=True):
        assert own == pytest.approx([advantage] * len(own), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_equal_rewards_have_exactly_zero_beside_others_that_differ(kind: Any, dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, NOT_SCORED, 1.0, 0.0, 0.1 + 0.2, 0.3], dtype=torch.float64).to(dtype)
    found = group_advantages(rewards, torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]), kind=kind).tolist()
    assert found[:4] == [0.0] * 4 and found[6:] == [0.0] * 2
    assert found[4] > 0 > found[5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_reward_and_one_beside_the_unscored_have_exactly_zero(kind: Any) -> None:
    rewards, ids = torch.tensor([0.7, 0.7, NOT_SCORED, 0.2, 1.0]), torch.tensor([0, 1, 1, 2, 2])
    found = group_advantages(rewards, ids, kind=kind).tolist()
    assert found[:3] == [0.0] * 3 and found[3] != 0


def test_leaving_one_out_is_the_deviation_from_the_mean_times_n_over_n_less_one() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    left_out, centred = (group_advantages(rewards, ids, kind=kind) for kind in ("leave_one_out", "group_mean"))
    torch.testing.assert_close(left_out, centred * 4 / 3, rtol=1e-12, atol=1e-14)


def test_each_token_is_compared_with_the_mean_of_the_other_responses_where_one_is_left_out() -> None:
    found = of_tokens([[1.0, 3.0], [4.0], [6.0, 6.0, 0.0]], [0, 0, 0], "leave_one_out")
    assert found == [pytest.approx(own) for own in ([1 - 4.0, 3 - 4.0], [4 - 3.0], [6 - 3.0, 6 - 3.0, 0 - 3.0])]


@pytest.mark.parametrize("kind", ["group", "group_mean", "batch"])
def test_the_responses_mean_advantages_of_a_group_add_up_to_zero(kind: Any) -> None:
    rewards, ids = random_rewards(3, per_token=True)
    found = of_tokens(rewards, ids, kind)
    for group in set(ids):
        total = sum(statistics.fmean(own) for own, i in zip(found, ids, strict=True) if i == group)
        assert total == pytest.approx(0, abs=1e-9)


def test_the_batchs_deviation_scales_all_groups_alike() -> None:
    rewards, ids = random_rewards(4, per_token=False)
    packed = torch.tensor([own[0] for own in rewards], dtype=torch.float64)
    by_batch, centred = (group_advantages(packed, torch.tensor(ids), kind=k) for k in ("batch", "group_mean"))
    scored = packed[~packed.isnan()]
    torch.testing.assert_close(by_batch, centred / scored.std(), rtol=1e-9, atol=1e-12)


def test_advantages_from_values_are_not_a_groups_business() -> None:
    with pytest.raises(ValueError, match="value model"):
        group_advantages(torch.ones(2), torch.zeros(2, dtype=torch.long), kind="gae")


def test_no_rewards_have_no_advantages() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    assert group_advantages(torch.zeros(0), nothing).tolist() == []
