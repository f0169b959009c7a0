"""The numbers of the reference and of the value model, against plain loops; absent where there are none."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.report.steps import TWO_GROUPS, batch, metrics, report

from gspo.learner.optimizer import StepReport
from gspo.types import Batch

VALUES = {0: [0.0, 0.5], 1: [1.0, 0.25, 0.5, 0.0], 3: [2.0]}
RETURNS = {0: [1.0, 1.0], 1: [0.0, 0.5, 0.5, -1.0], 3: [3.0]}


def tensors(numbers: dict[int, list[float]]) -> dict[int, torch.Tensor]:
    return {index: torch.tensor(one) for index, one in numbers.items()}


def appraised(**given: Any) -> Batch:
    return batch([[2, 4], [3, 1]], [[1.0, 0.0], [None, 3.0]], **given)


def variance(values: Sequence[float]) -> float:
    middle = sum(values) / len(values)
    return sum((value - middle) ** 2 for value in values) / len(values)


def test_the_explained_variance_is_over_the_tokens_that_have_a_return() -> None:
    values = {2: torch.tensor([9.0, 9.0, 9.0]), **tensors(VALUES)}  # of a response without a reward
    made = appraised(returns=tensors(RETURNS), values=values)
    steps = [StepReport(grad_norm=norm, learning_rate=rate, applied=True) for norm, rate in ((2.0, 1e-3), (6.0, 5e-4))]
    losses = (0.5, 0.25)
    reports = [report(critic_step=step, value_loss=loss) for step, loss in zip(steps, losses, strict=True)]
    line = metrics(made, *reports)
    flat_values, flat_returns = ([one for part in numbers.values() for one in part] for numbers in (VALUES, RETURNS))
    errors = [one - other for one, other in zip(flat_returns, flat_values, strict=True)]
    assert line["critic/explained_variance"] == pytest.approx(1 - variance(errors) / variance(flat_returns))
    assert line["critic/value_mean"] == pytest.approx(sum(flat_values) / 7)
    assert line["critic/loss"] == pytest.approx(0.375)
    assert line["critic/grad_norm"] == 4
    assert line["critic/learning_rate"] == 5e-4


def test_values_off_by_a_constant_explain_everything_and_equal_returns_leave_nothing_to_explain() -> None:
    for shift in (0.0, 5.0):
        values = {index: one + shift for index, one in tensors(RETURNS).items()}
        made = appraised(returns=tensors(RETURNS), values=values)
        assert metrics(made, report())["critic/explained_variance"] == pytest.approx(1)
    returns = {index: torch.ones_like(one) for index, one in tensors(RETURNS).items()}
    made = appraised(returns=returns, values=tensors(VALUES))
    assert math.isnan(metrics(made, report())["critic/explained_variance"])


def test_the_kl_of_the_loss_is_the_updates_own() -> None:
    made = appraised(reference_logprobs={0: torch.tensor([-3.0, -3.0])})
    line = metrics(made, report(kl=0.25), report(kl=0.75), kl={"coefficient": 0.1})
    assert line["reference/kl"] == 0.5 and line["reference/kl_by_mini_batch"] == [0.25, 0.75]


def test_the_kl_of_the_reward_is_measured_on_what_was_sampled() -> None:
    reference = {0: [-1.5, -2.0], 1: [-1.0, -1.0, -1.0, -0.5], 3: [-4.0]}  # the sampler's are all -1
    made = appraised(reference_logprobs=tensors(reference))
    line = metrics(made, report(kl=9.0), kl={"coefficient": 0.1, "place": "reward"})
    assert line["reference/kl"] == pytest.approx((1.5 / 2 - 0.5 / 4 + 3.0) / 3)  # a response counts once
    assert "reference/kl_by_mini_batch" not in line


def test_without_reference_and_value_model_there_are_no_such_numbers() -> None:
    assert not any(name.startswith(("reference/", "critic/")) for name in metrics(TWO_GROUPS, report()))
