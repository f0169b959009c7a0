"""Whose gradient it is, and how much of it is signal, by hand."""

import math

import pytest
from tests.report.steps import TWO_GROUPS, batch, metrics, report, trained

from gspo.learner.optimizer import Noise

LENGTHS = [2, 4, 6, 10]


def test_the_shares_are_of_the_gradient_and_of_the_tokens_by_length_and_side() -> None:
    made = batch([LENGTHS], [[0.0] * 4], advantage=(1.0, -1.0, 0.5, 0.0))
    weights = [0.1, 0.2, 0.3, 1.4]
    items = [trained(index, index // 2, LENGTHS[index], 0, 1.0, gradient_weight=weights[index]) for index in range(4)]
    line = metrics(made, report(*items[2:]), report(*items[:2]))  # in any order
    assert line["gradient/share_by_length"] == pytest.approx([0.05, 0.1, 0.15, 0.7])
    assert line["response/token_share_by_length"] == pytest.approx([2 / 22, 4 / 22, 6 / 22, 10 / 22])
    assert line["gradient/share_positive"] == pytest.approx((0.1 + 0.3) / 2.0)


def test_an_empty_part_has_no_share_and_a_step_without_gradient_has_none_at_all() -> None:
    made = batch([[7, 7]], [[1.0, 0.0]])
    items = [trained(index, 0, 7, 0, 1.0, gradient_weight=1.0) for index in range(2)]
    line = metrics(made, report(*items))
    assert line["gradient/share_by_length"] == line["response/token_share_by_length"] == [1, 0, 0, 0]
    for nothing in (metrics(TWO_GROUPS, report()), metrics(made, report(trained(0, 0, 7, 7, 1.0)))):
        assert math.isnan(nothing["gradient/share_positive"])
        assert all(map(math.isnan, nothing["gradient/share_by_length"]))


def test_signal_and_noise_are_summed_over_the_mini_batches_before_they_are_divided() -> None:
    noises = [Noise(signal=1.0, noise=2.0), None, Noise(signal=-0.5, noise=8.0)]
    line = metrics(TWO_GROUPS, *(report(noise=noise) for noise in noises))
    assert line["gradient/signal_to_noise"] == pytest.approx(0.5 / 10)
    first, second, third = line["gradient/signal_to_noise_by_mini_batch"]
    assert (first, third) == (0.5, -0.0625) and math.isnan(second)


def test_a_noise_that_is_not_measured_or_nothing_has_no_ratio() -> None:
    assert math.isnan(metrics(TWO_GROUPS, report())["gradient/signal_to_noise"])
    line = metrics(TWO_GROUPS, report(noise=Noise(signal=0.0, noise=0.0)))
    assert math.isnan(line["gradient/signal_to_noise"]) and math.isnan(
        line["gradient/signal_to_noise_by_mini_batch"][0]
    )
