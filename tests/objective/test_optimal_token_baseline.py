"""The optimal token baseline: the equation in plain loops, and what it is the best for."""

import inspect
import random

import pytest
import torch

from gspo.objective import advantage, optimal_token_advantages

NOT_SCORED = float("nan")
Group = list[list[tuple[float, float]]]  # of each token of each response: what it earns, and its squared error


def plain(group: Group) -> list[list[float]]:
    """The definition for one group: B_t = Σ_i G W / Σ_i W over the responses that have a token t."""
    to_go = [[sum(reward for reward, _ in own[t:]) for t in range(len(own))] for own in group]
    energy = [[sum(error for _, error in own[: t + 1]) for t in range(len(own))] for own in group]
    found = []
    for own in to_go:
        live = [[i for i, other in enumerate(group) if len(other) > t] for t in range(len(own))]
        baselines = [
            sum(to_go[i][t] * energy[i][t] for i in at) / sum(energy[i][t] for i in at) for t, at in enumerate(live)
        ]
        found.append([value - baseline for value, baseline in zip(own, baselines, strict=True)])
    return found


def packed(groups: list[Group], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    tokens = torch.tensor([token for group in groups for own in group for token in own], dtype=dtype)
    lengths = torch.tensor([len(own) for group in groups for own in group])
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    return optimal_token_advantages(tokens[:, 0], tokens[:, 1], lengths, ids)


def drawn(seed: int, *, at_the_end: bool) -> list[Group]:
    """Three groups of responses of different lengths, which earn rewards at all tokens, or at their ends."""
    rng = random.Random(seed)

    def response() -> list[tuple[float, float]]:
        length = rng.randint(1, 7)
        last = [not at_the_end or t == length - 1 for t in range(length)]
        return [(rng.gauss(0, 1) * is_paid, rng.uniform(0, 2)) for is_paid in last]

    return [[response() for _ in range(rng.randint(2, 5))] for _ in range(3)]


@pytest.mark.parametrize("at_the_end", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_those_of_the_equation(seed: int, at_the_end: bool) -> None:
    groups = drawn(seed, at_the_end=at_the_end)
    expected = [value for group in groups for own in plain(group) for value in own]
    assert packed(groups).tolist() == pytest.approx(expected, abs=1e-9)
    assert packed(groups, torch.float32).tolist() == pytest.approx(expected, abs=1e-5)


def test_no_other_baseline_at_a_place_has_a_smaller_weighted_square() -> None:
    (group, *_) = drawn(3, at_the_end=True)
    found, place = packed([group]).split([*map(len, group)]), 0
    weights = torch.tensor([own[place][1] for own in group], dtype=torch.float64)
    at = torch.stack([own[place] for own in found])
    best = (weights * at**2).sum()
    assert all(best < (weights * (at + shift) ** 2).sum() for shift in (-0.01, 0.01))


def test_a_response_that_is_not_scored_counts_for_none() -> None:
    group: Group = [[(0.0, 0.5), (1.0, 1.5)], [(0.5, 1.0)]]
    unscored: Group = [group[0], [(NOT_SCORED, 9.0), (1.0, 9.0)], group[1]]
    alone = packed([group]).tolist()
    assert packed([unscored]).tolist() == [*alone[:2], 0.0, 0.0, alone[2]]


def test_equal_rewards_and_a_lone_response_are_nothing_to_learn_from_and_certain_tokens_compare_with_the_mean() -> None:
    assert packed([[[(0.1 + 0.2, 0.3)], [(0.3, 0.7)]], [[(5.0, 0.2)]]]).tolist() == [0.0, 0.0, 0.0]
    assert packed([[[(1.0, 0.0)], [(0.0, 0.0)]]]).tolist() == [0.5, -0.5]


def test_shapes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked = inspect.unwrap(optimal_token_advantages)  # the shape checks of the test run would speak first
    monkeypatch.setattr("gspo.objective.advantage._returns", inspect.unwrap(advantage._returns))
    one, lengths, ids = torch.ones(2), torch.tensor([2]), torch.tensor([0])
    with pytest.raises(ValueError, match="group_ids"):
        unchecked(one, one, lengths, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="squared_errors has 3 tokens"):
        unchecked(one, torch.ones(3), lengths, ids)
