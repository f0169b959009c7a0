"""GDPO (arXiv 2601.05242): each reward compared in its group, then summed, and divided by the batch's deviation."""

import inspect
import math
import random
import statistics

import pytest
import torch

from gspo.objective import group_advantages, normalize_then_sum

NONE = math.nan


def gdpo(rewards: list[list[float]], weights: list[float], ids: list[int], ddof: int = 1) -> list[float]:
    """The equations, in plain loops: A_k, Σ_k w_k A_k, and (A - mean(A)) / std(A) over the scored of the batch."""

    def deviation(values: list[float]) -> float:
        mean = statistics.fmean(values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - ddof, 1))

    sums: list[float | None] = []
    for place, group in enumerate(ids):
        terms = []
        for weight, own in zip(weights, rewards, strict=True):
            peers = [value for value, other in zip(own, ids, strict=True) if other == group and not math.isnan(value)]
            if not math.isnan(own[place]):
                spread = deviation(peers) if len(set(peers)) > 1 else 1.0
                terms.append(weight * (own[place] - statistics.fmean(peers)) / spread)
        sums.append(math.fsum(terms) if terms else None)
    scored = [value for value in sums if value is not None]
    mean, spread = statistics.fmean(scored), deviation(scored)
    return [0.0 if value is None else (value - mean) / spread for value in sums]


def built(rewards: list[list[float]], weights: list[float], ids: list[int], ddof: int = 1) -> list[float]:
    given = torch.tensor(rewards, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    return normalize_then_sum(*given, torch.tensor(ids), ddof=ddof).tolist()


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_equation(seed: int, ddof: int) -> None:
    rng = random.Random(seed)
    ids = [rng.choice([3, 70, 5, -4]) for _ in range(40)]
    rewards = [[rng.choice([rng.gauss(0, scale), scale, 0.0, NONE]) for _ in ids] for scale in (1.0, 50.0, 0.01)]
    rewards[2] = [NONE if index == 3 else value for index, value in enumerate(rewards[2])]
    for own in rewards:
        own[7] = NONE  # no function applies to that one
    weights = [1.0, 0.5, -2.0]
    result = built(rewards, weights, ids, ddof)
    assert result == pytest.approx(gdpo(rewards, weights, ids, ddof), rel=1e-9, abs=1e-12)
    assert result[7] == 0.0 and math.fsum(result) == pytest.approx(0.0, abs=1e-9)


def test_what_the_sum_cannot_tell_apart_is_told_apart() -> None:
    """The paper's example: of two binary rewards, one right answer of two is not two of two in another group."""
    rewards = [[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    ids = [0, 0, 1, 1]
    summed = group_advantages(torch.tensor(rewards).sum(0), torch.tensor(ids)).tolist()
    assert summed[:2] == pytest.approx(summed[2:])
    lone, _, both, _ = built(rewards, [1.0, 1.0], ids)
    assert both == pytest.approx(2 * lone)


def test_no_reward_outweighs_another_by_its_scale() -> None:
    rewards = [[0.0, 1.0, 1.0, 0.0], [3.0, 1.0, 2.0, 7.0]]
    scaled = [rewards[0], [1000 * value + 5 for value in rewards[1]]]
    assert built(scaled, [1.0, 1.0], [0] * 4) == pytest.approx(built(rewards, [1.0, 1.0], [0] * 4))


def test_groups_that_tell_nothing_are_exactly_zero() -> None:
    equal, cancelling, telling = [0.1, 0.1], [1.0, 0.0], [0.0, 1.0]
    first, second = [*equal, *cancelling, *telling], [*equal, *reversed(cancelling), *telling]
    result = built([first, [value / 3 for value in second]], [0.3, 0.3], [0, 0, 1, 1, 2, 2])
    assert result[:4] == [0.0] * 4 and result[4] < 0 < result[5]
    assert built([equal], [1.0], [0, 0]) == [0.0, 0.0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[K, B\]"):
        inspect.unwrap(normalize_then_sum)(torch.zeros(2, 4), torch.ones(3), torch.zeros(4, dtype=torch.long))
