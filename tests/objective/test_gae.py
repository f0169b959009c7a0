"""PPO's advantages against their definition as a sum, what values would make them exact, and the loss of values."""

import random
import statistics

import pytest
import torch

from gspo.objective import advantages_and_returns, value_loss
from gspo.objective.advantage import whitened

SETTINGS = [(1.0, 0.95), (1.0, 1.0), (0.9, 0.5), (0.97, 0.0), (0.0, 0.7)]


def random_response(seed: int, length: int) -> tuple[list[float], list[float]]:
    rng = random.Random(seed)
    return [rng.gauss(0, 1) for _ in range(length)], [rng.gauss(0, 1) for _ in range(length)]


def computed(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (rewards, values))
    advantages, returns = advantages_and_returns(*tensors, gamma=gamma, lam=lam)
    return advantages.tolist(), returns.tolist()


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
def test_advantages_are_the_discounted_sum_of_all_later_errors(gamma: float, lam: float, length: int) -> None:
    rewards, values = random_response(0, length)
    after = [*values, 0.0]  # 0 where the response has ended
    expected = [
        sum((gamma * lam) ** (k - t) * (rewards[k] + gamma * after[k + 1] - after[k]) for k in range(t, length))
        for t in range(length)
    ]
    advantages, returns = computed(rewards, values, gamma, lam)
    assert advantages == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert returns == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], rel=1e-12, abs=1e-14)


def test_responses_packed_one_after_another_are_each_as_they_would_be_alone() -> None:
    pieces = [random_response(seed, length) for seed, length in enumerate([3, 1, 7, 2])]
    rewards, values = (torch.tensor([x for one in pieces for x in one[n]], dtype=torch.float64) for n in (0, 1))
    together = advantages_and_returns(rewards, values, torch.tensor([3, 1, 7, 2]), gamma=0.9, lam=0.5)
    alone = [computed(*one, 0.9, 0.5) for one in pieces]
    for number in (0, 1):
        assert together[number].tolist() == pytest.approx([x for one in alone for x in one[number]], rel=1e-12)


def test_their_operations_do_not_grow_with_the_number_of_responses() -> None:
    """512 responses of 8,192 tokens took a minute, an operation a token."""

    def operations(num_responses: int) -> int:
        rewards, lengths = torch.zeros(num_responses * 30), torch.full((num_responses,), 30)
        with torch.profiler.profile() as profile:
            advantages_and_returns(rewards, rewards, lengths, gamma=1.0, lam=0.95)
        return len(profile.events())

    operations(2)
    assert operations(200) == operations(2)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_with_lambda_one_the_return_is_what_is_still_to_come_whatever_the_values(gamma: float) -> None:
    rewards, values = random_response(1, 6)
    _, returns = computed(rewards, values, gamma, 1.0)
    to_come = [sum(gamma ** (k - t) * rewards[k] for k in range(t, 6)) for t in range(6)]
    assert returns == pytest.approx(to_come, rel=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
def test_values_that_are_right_leave_no_advantage(gamma: float, lam: float) -> None:
    rewards, _ = random_response(2, 5)
    values = [sum(gamma ** (k - t) * rewards[k] for k in range(t, 5)) for t in range(5)]
    advantages, returns = computed(rewards, values, gamma, lam)
    assert advantages == pytest.approx([0.0] * 5, abs=1e-12)
    assert returns == pytest.approx(values, rel=1e-12)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_the_counted_tokens() -> None:
    pieces = [torch.tensor(random_response(n, n)[0], dtype=torch.float64) * 3 + 1 for n in (1, 4, 9)]
    counted = torch.cat([torch.full((len(piece),), number != 1) for number, piece in enumerate(pieces)])
    found = whitened(torch.cat(pieces), counted)[counted].tolist()
    before = torch.cat(pieces)[counted].tolist()
    mean, std = statistics.fmean(before), statistics.stdev(before)
    assert found == pytest.approx([(value - mean) / std for value in before], rel=1e-12)


@pytest.mark.parametrize("values", [[2.0], [0.5, 0.5, 0.5]])
def test_whitening_what_does_not_differ_leaves_zero(values: list[float]) -> None:
    found = whitened(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))
    assert found.tolist() == [0.0] * len(values)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_and_its_gradient_are_those_of_the_equation(clip: float | None) -> None:
    rng = random.Random(3)
    old, new, returns = ([rng.gauss(0, 0.4) for _ in range(60)] for _ in range(3))
    values = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss = value_loss(values, torch.tensor(old, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64), clip)
    (slope,) = torch.autograd.grad(loss.sum(), values)
    stopped = 0
    for n, (v, v_old, r) in enumerate(zip(new, old, returns, strict=True)):
        near = v if clip is None else v_old + min(max(v - v_old, -clip), clip)
        assert loss[n].item() == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2, rel=1e-12)
        stops = near != v and (near - r) ** 2 > (v - r) ** 2  # it has moved enough towards the return
        assert slope[n].item() == pytest.approx(0.0 if stops else v - r, rel=1e-12)
        stopped += stops
    assert (0 < stopped < 60) == (clip is not None)
