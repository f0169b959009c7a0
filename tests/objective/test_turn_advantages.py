"""Credit by turn: the expected gradient is that of the rewards exactly, and what is common beside it is not."""

import pytest
import torch
from benchmarks import turn_credit

from gspo.objective import turn_advantages

NOT_SCORED = float("nan")


def plain(responses: list[list[float]], discount: float) -> list[list[float]]:
    """The definition, turn by turn, for one group."""
    returns = [
        [sum(discount ** (later - turn) * own[later] for later in range(turn, len(own))) for turn in range(len(own))]
        for own in responses
    ]
    advantages = []
    for number, own in enumerate(returns):
        others = [other for place, other in enumerate(returns) if place != number]
        live = [[other[turn] for other in others if len(other) > turn] for turn in range(len(own))]
        advantages.append([value - (sum(at) / len(at) if at else 0.0) for value, at in zip(own, live, strict=True)])
    return advantages


def packed(groups: list[list[list[float]]], discount: float) -> list[float]:
    responses = [own for group in groups for own in group]
    rewards = torch.tensor([reward for own in responses for reward in own], dtype=torch.float64)
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    return turn_advantages(rewards, torch.tensor([*map(len, responses)]), ids, discount=discount).tolist()


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_a_turns_return_is_compared_with_those_of_the_others_that_have_such_a_turn(discount: float) -> None:
    groups = [[[0.0, 1.0, 0.25], [2.0], [0.5, -1.0]], [[1.0], [3.0, 0.5]]]
    expected = [value for group in groups for own in plain(group, discount) for value in own]
    assert packed(groups, discount) == pytest.approx(expected, abs=1e-12)


def test_equal_rewards_are_nothing_to_learn_from_and_rounding_is_none() -> None:
    assert packed([[[0.1, 0.2], [0.3 - 0.2, 0.2]]], 1.0) == [0.0] * 4
    assert packed([[[1e6 + 0.5], [1e6]], [[1.0], [0.5]]], 1.0) == [0.0, 0.0, 0.5, -0.5]  # beside a million 0.5 is one


def test_a_response_that_is_not_scored_counts_for_none() -> None:
    alone = packed([[[1.0, 2.0], [0.5, 0.0]]], 1.0)
    assert packed([[[1.0, 2.0], [5.0, NOT_SCORED, 1.0], [0.5, 0.0]]], 1.0) == [*alone[:2], 0, 0, 0, *alone[2:]]


def test_the_gradient_is_that_of_the_expected_rewards_with_a_constant_divisor_and_else_it_is_not() -> None:
    groups, true = turn_credit.every_group(), turn_credit.true_gradient()
    biases = {row: turn_credit.bias_of(turn_credit.expected_gradient(groups, *row), true) for row in turn_credit.ROWS}
    unbiased = {("return_to_go", "constant"), ("trajectory", "constant")}
    assert {row for row, bias in biases.items() if bias < 1e-9} == unbiased
    assert min(bias for row, bias in biases.items() if row not in unbiased) > 0.1
