"""Every kind of advantage against plain loops, and rewards that tokens earn along the way."""

import inspect
import math
import random
import statistics
from itertools import product
from typing import Any

import pytest
import torch

from gspo.objective import group_advantages, token_advantages

KINDS = ["group", "group_mean", "leave_one_out", "batch", "max_rl"]
NOT_SCORED = float("nan")


def rewards_to_go(earned: list[float], places: list[int], discount: float) -> list[float]:
    """Σ over the token and those after it, discounted by the places between."""
    count = range(len(earned))
    return [sum(discount ** (places[k] - places[t]) * earned[k] for k in count if k >= t) for t in count]


def by_loops(
    rewards: list[list[float]], ids: list[int], kind: str, ddof: int, places: list[list[int]], discount: float = 1.0
) -> list[list[float]]:
    """Advantages of each response's tokens; a response weighs 1, a token 1/|y|."""
    to_go = [rewards_to_go(own, its, discount) for own, its in zip(rewards, places, strict=True)]
    scored = [i for i, own in enumerate(rewards) if not any(math.isnan(r) for r in own)]

    def at(i: int, place: int) -> float:
        """What response i had to go at the place, or at its last one before."""
        reached = [t for t in range(len(to_go[i])) if places[i][t] <= place]
        return to_go[i][places[i].index(places[i][reached[-1]])]

    def differences(i: int, around: list[int]) -> list[float]:
        return [
            to_go[i][t] - statistics.fmean(at(j, places[i][t]) for j in around) if around else 0.0
            for t in range(len(to_go[i]))
        ]

    def spread(members: list[int]) -> float:
        total = sum(statistics.fmean(d * d for d in differences(j, members)) for j in members)
        return math.sqrt(total / max(1, len(members) - ddof))

    found = []
    for i, own in enumerate(rewards):
        group = [j for j in scored if ids[j] == ids[i]]
        others = [j for j in group if j != i]
        longest = range(1 + max((p for j in group for p in places[j]), default=0))
        if i not in scored or all(len({round(at(j, place), 12) for j in group}) < 2 for place in longest):
            found.append([0.0] * len(own))
            continue
        if kind == "max_rl":  # divided by the mean at the token's place
            means = [statistics.fmean(at(j, place) for j in group) for place in places[i]]
            found.append([d / (mean or 1.0) for d, mean in zip(differences(i, group), means, strict=True)])
            continue
        scale = spread(group) if kind == "group" else spread(scored) if kind == "batch" else 1.0
        found.append([d / scale for d in differences(i, others if kind == "leave_one_out" else group)])
    return found


def random_rewards(seed: int, *, per_token: bool, kind: str) -> tuple[list[list[float]], list[int]]:
    """Unequal groups, not contiguous; some equal, some responses not scored. At least two scored a group.

    None is negative for max_rl.
    """
    rng = random.Random(seed)
    ids = [rng.choice([3, 70, 5, -4]) for _ in range(50)] + [8] * 6 + [9] * 4 + [3, 70, 5, -4] * 2
    rewards = []
    for i in ids:
        own = 0.1 if i == 8 else NOT_SCORED if i == 9 else rng.choice([rng.gauss(0, 1), 1.0, 0.0, NOT_SCORED])
        tokens = [0.0] * rng.randint(0, 4) + [own]  # all at the end
        if per_token and i not in (8, 9):
            tokens = [rng.gauss(0, 1) for _ in tokens]
            if math.isnan(own):  # a single one is enough
                tokens[rng.randrange(len(tokens))] = NOT_SCORED
        rewards.append(tokens)
    for place in range(-8, 0):
        rewards[place] = [rng.gauss(0, 1)] if not per_token else [rng.gauss(0, 1) for _ in range(3)]
    return [[abs(r) for r in own] for own in rewards] if kind == "max_rl" else rewards, ids


def of_tokens(rewards: list[list[float]], ids: list[int], kind: Any, ddof: int = 1, **more: Any) -> list[list[float]]:
    packed = torch.tensor([r for own in rewards for r in own], dtype=torch.float64)
    lengths = [len(own) for own in rewards]
    found = token_advantages(packed, torch.tensor(lengths), torch.tensor(ids), kind=kind, ddof=ddof, **more)
    return [piece.tolist() for piece in found.split(lengths)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_reward_a_response_is_compared_as_the_loops_do(kind: Any, ddof: int, seed: int) -> None:
    rewards, ids = random_rewards(seed, per_token=False, kind=kind)
    alone = [own[-1:] for own in rewards]
    expected = by_loops(alone, ids, kind, ddof, [[0]] * len(ids))
    packed = torch.tensor([own[0] for own in alone], dtype=torch.float64)
    found = group_advantages(packed, torch.tensor(ids), kind=kind, ddof=ddof).tolist()
    assert found == pytest.approx([own[0] for own in expected], rel=1e-9, abs=1e-12)
    assert any(found) and 0.0 in found


@pytest.mark.parametrize("discount", [1.0, 0.7])
@pytest.mark.parametrize("by_segment", [False, True])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_a_token_is_compared_as_the_loops_do(kind: Any, ddof: int, by_segment: bool, discount: float) -> None:
    rewards, ids = random_rewards(0, per_token=True, kind=kind)
    rng = random.Random(1)
    places = [list(range(len(own))) for own in rewards]
    if by_segment:  # of one token or more; some come without any
        places = [sorted([0, *(rng.randint(0, 4) for _ in own[1:])]) for own in rewards]
    more = {"places": torch.tensor([p for own in places for p in own])} if by_segment else {}
    found = of_tokens(rewards, ids, kind, ddof, discount=discount, **more)
    for mine, theirs in zip(found, by_loops(rewards, ids, kind, ddof, places, discount), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_responses_that_earn_all_at_the_end_compare_as_wholes_whatever_their_lengths(kind: Any, ddof: int) -> None:
    rewards, ids = random_rewards(2, per_token=False, kind=kind)
    packed = torch.tensor([own[-1] for own in rewards], dtype=torch.float64)
    wanted = group_advantages(packed, torch.tensor(ids), kind=kind, ddof=ddof).tolist()
    for own, advantage in zip(of_tokens(rewards, ids, kind, ddof), wanted, strict=True):
        assert own == pytest.approx([advantage] * len(own), rel=1e-9, abs=1e-12)


# A coin of probability ½ is drawn by a response's first token, and its second token earns the reward of it.
@pytest.mark.parametrize(("kind", "factor"), [("leave_one_out", 1.0), ("group_mean", 7 / 8), ("group", None)])
def test_what_is_earned_later_is_credited_to_the_token_that_led_to_it(kind: Any, factor: float | None) -> None:
    """By enumeration of all groups of 8: E[Â_1 ∂ log π] of the coin; the true gradient of the reward is ¼."""
    total, never = 0.0, 0.0
    for coins in product([0.0, 1.0], repeat=8):
        found = of_tokens([[0.0, coin] for coin in coins], [0] * 8, kind)
        total += sum(own[0] * (coin - 0.5) for own, coin in zip(found, coins, strict=True)) / 8 / 2**8
        # And what was earned before is none of a token's doing: another coin of the second token, of no reward.
        never += sum(
            own[1] * (1 - 2 * (n % 2)) for n, own in enumerate(of_tokens([[c, 0.0] for c in coins], [0] * 8, kind))
        )
    assert total == pytest.approx(0.25 * factor if factor else 0.434, abs=1e-12 if factor else 5e-4)
    assert never == 0


def test_a_later_segments_reward_is_discounted_by_the_segments_between() -> None:
    places = torch.tensor([0, 0, 1, 2, 2, 0])  # segments of 2, 1 and 2 tokens; and a response of one token
    rewards = [[0.0, 1.0, 2.0, 0.0, 4.0], [0.0]]
    found = of_tokens(rewards, [0, 0], "leave_one_out", places=places, discount=0.5)
    assert found[0] == pytest.approx([1 + 1 + 1, 1 + 1 + 1, 2 + 2, 4, 4])
    assert found[1] == pytest.approx([-3.0])


@pytest.mark.parametrize("kind", KINDS)
def test_responses_that_earn_alike_along_the_way_have_exactly_zero(kind: Any) -> None:
    # Less is left to go the further a token stands: that alone is no difference between responses.
    found = of_tokens([[1.0, 0.1, 0.2, 1.0]] * 4, [0] * 4, kind)
    assert found == [[0.0] * 4] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_equal_rewards_have_exactly_zero_beside_others_that_differ(kind: Any, dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, NOT_SCORED, 1.0, 0.0, 0.1 + 0.2, 0.3], dtype=torch.float64).to(dtype)
    found = group_advantages(rewards, torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]), kind=kind).tolist()
    assert found[:4] == [0.0] * 4 and found[6:] == [0.0] * 2
    assert found[4] > 0 > found[5]


@pytest.mark.parametrize("reward", [1.0, 0.3, 123.4, -7.0])
@pytest.mark.parametrize("kind", KINDS)
def test_rewards_that_differ_by_the_rounding_of_float32_are_equal_and_others_are_not(kind: Any, reward: float) -> None:
    reward = abs(reward) if kind == "max_rl" else reward
    one = torch.tensor(reward)
    next_one = torch.nextafter(one, torch.tensor(torch.inf))
    ids = torch.zeros(4, dtype=torch.long)
    for dtype in (torch.float32, torch.float64):
        rounded = torch.stack([one, next_one, one, one]).to(dtype)
        assert group_advantages(rounded, ids, kind=kind).tolist() == [0.0] * 4
    cancelled = torch.tensor([0.1 + 0.2 - 0.3, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert cancelled[0] != 0 and group_advantages(cancelled, ids, kind=kind).tolist() == [0.0] * 4
    apart = torch.tensor([reward, reward * (1 + 4e-6), reward, reward], dtype=torch.float64)
    assert group_advantages(apart, ids, kind=kind).count_nonzero() == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_reward_and_one_beside_the_unscored_have_exactly_zero(kind: Any) -> None:
    rewards, ids = torch.tensor([0.7, 0.7, NOT_SCORED, 0.2, 1.0]), torch.tensor([0, 1, 1, 2, 2])
    found = group_advantages(rewards, ids, kind=kind).tolist()
    assert found[:3] == [0.0] * 3 and found[3] != 0


def test_leaving_one_out_is_the_deviation_from_the_mean_times_n_over_n_less_one() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    left_out, centred = (group_advantages(rewards, ids, kind=kind) for kind in ("leave_one_out", "group_mean"))
    torch.testing.assert_close(left_out, centred * 4 / 3, rtol=1e-12, atol=1e-14)


def test_a_token_is_compared_with_what_the_others_had_to_go_at_its_place() -> None:
    found = of_tokens([[1.0, 3.0], [4.0], [6.0, 6.0, 0.0]], [0, 0, 0], "leave_one_out")
    # To go: (4, 3), (4), (12, 6, 0); where a response has ended, its last.
    assert found == [pytest.approx(own) for own in ([4 - 8.0, 3 - 5.0], [4 - 8.0], [12 - 4.0, 6 - 3.5, 0 - 3.5])]


def test_the_batchs_deviation_scales_all_groups_alike() -> None:
    rewards, ids = random_rewards(4, per_token=False, kind="batch")
    packed = torch.tensor([own[-1] for own in rewards], dtype=torch.float64)
    by_batch, centred = (group_advantages(packed, torch.tensor(ids), kind=k) for k in ("batch", "group_mean"))
    scored = packed[~packed.isnan()]
    torch.testing.assert_close(by_batch, centred / scored.std(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kind": "gae"}, "value model"),
        ({"kind": "optimal_token_baseline"}, "squared errors of the tokens: optimal_token_advantages"),
        ({"kind": "max_rl", "rewards": torch.tensor([1.0, -0.1])}, "mean of a group's rewards: give rewards of 0"),
        ({"kind": "rloo"}, "unknown kind 'rloo': group, group_mean"),
        ({"lengths": torch.tensor([1.0, 1.0])}, "lengths are whole numbers"),
        ({"lengths": torch.tensor([1, 2])}, "lengths sum to 3, but rewards has 2 tokens"),
        ({"rewards": torch.ones(2, 5)}, r"rewards\[mask\], lengths = mask.sum\(1\)"),
        ({"group_ids": torch.zeros(3, dtype=torch.long)}, "group_ids"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(
    arguments: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"rewards": torch.ones(2), "lengths": torch.tensor([1, 1]), "group_ids": torch.zeros(2, dtype=torch.long)}
    unchecked = inspect.unwrap(token_advantages)  # the shape checks of the test run would speak first
    with pytest.raises(ValueError, match=match):
        unchecked(**{**given, **arguments})
    if "kind" in arguments:
        monkeypatch.setattr("gspo.objective.advantage.token_advantages", unchecked)
        with pytest.raises(ValueError, match=match):
            inspect.unwrap(group_advantages)(
                **{"rewards": given["rewards"], "group_ids": given["group_ids"], **arguments}
            )


def test_no_rewards_have_no_advantages() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    assert group_advantages(torch.zeros(0), nothing).tolist() == []
