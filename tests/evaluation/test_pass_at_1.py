"""pass@1 and its standard error, by hand and against the binomial's."""

import math

import pytest

from gspo.evaluation.pass_at_1 import pass_at_1


def test_the_rate_is_the_mean_of_the_queries_rates() -> None:
    rate, _ = pass_at_1([[True, False, False, False], [True, True, True, True]])
    assert rate == pytest.approx((0.25 + 1.0) / 2)


def test_a_query_weighs_the_same_however_many_samples_it_has() -> None:
    rate, _ = pass_at_1([[True], [False] * 9])
    assert rate == 0.5


def test_with_one_sample_a_query_the_error_is_the_binomials() -> None:
    outcomes = [[True]] * 30 + [[False]] * 70
    rate, error = pass_at_1(outcomes)
    assert rate == pytest.approx(0.3)
    assert error == pytest.approx(math.sqrt(0.3 * 0.7 / 99))


def test_the_error_is_over_questions_and_not_over_samples() -> None:
    _, few = pass_at_1([[True], [False]] * 8)
    _, many = pass_at_1([[True] * 10, [False] * 10] * 8)  # the same questions' rates: no more is known of other ones
    assert many == pytest.approx(few)


def test_certain_outcomes_have_no_error() -> None:
    for outcome, rate in [(True, 1.0), (False, 0.0)]:
        assert pass_at_1([[outcome]] * 5) == (rate, 0.0)
