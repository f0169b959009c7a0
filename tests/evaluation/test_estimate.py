"""A mean over questions with its two standard errors, by hand, against the binomial's and by simulation."""

import math
import random
import statistics

import pytest

from gspo.evaluation.held_out import estimate


def test_the_rate_is_the_mean_of_the_queries_rates() -> None:
    assert estimate([[True, False, False, False], [True, True, True, True]]).mean == pytest.approx((0.25 + 1.0) / 2)


def test_a_query_weighs_the_same_however_many_samples_it_has() -> None:
    assert estimate([[True], [False] * 9]).mean == 0.5


def test_with_one_sample_a_query_the_error_is_the_binomials() -> None:
    found = estimate([[True]] * 30 + [[False]] * 70)
    assert found.mean == pytest.approx(0.3)
    assert found.error_over_questions == pytest.approx(math.sqrt(0.3 * 0.7 / 99))


def test_the_error_over_questions_is_not_smaller_for_more_samples_of_the_same_rates() -> None:
    few = estimate([[True], [False]] * 8)
    many = estimate([[True] * 10, [False] * 10] * 8)  # no more is known of other questions
    assert many.error_over_questions == pytest.approx(few.error_over_questions)


def test_the_error_over_samples_is_by_hand() -> None:
    found = estimate([[True, True, False], [True, False]])
    by_hand = math.sqrt((2 / 3) * (1 / 3) / 2 + (1 / 2) * (1 / 2) / 1) / 2  # (1/Q) √Σ p̂ (1 − p̂)/(n − 1)
    assert found.error_over_samples == pytest.approx(by_hand)
    assert estimate([[0.0, 4.0]]).error_over_samples == pytest.approx(statistics.stdev([0, 4]) / math.sqrt(2))


def test_each_error_is_the_deviation_of_the_means_of_repetitions_of_what_it_is_over() -> None:
    dice = random.Random(0)
    rates = [dice.random() for _ in range(20)]

    def sampled(questions: list[float]) -> list[list[bool]]:
        return [[dice.random() < rate for _ in range(4)] for rate in questions]

    again = [estimate(sampled(rates)) for _ in range(2000)]
    others = [estimate(sampled([dice.random() for _ in range(20)])) for _ in range(2000)]
    for found, name in ((again, "error_over_samples"), (others, "error_over_questions")):
        told = math.sqrt(statistics.fmean(getattr(one, name) ** 2 for one in found))
        assert told == pytest.approx(statistics.stdev(one.mean for one in found), rel=0.05), name


def test_a_single_question_has_an_error_over_its_samples_alone() -> None:
    found = estimate([[True, False, True, True]])
    assert math.isnan(found.error_over_questions)
    assert found.error_over_samples == pytest.approx(math.sqrt(0.75 * 0.25 / 3))


def test_where_a_question_has_one_sample_there_is_no_error_over_samples() -> None:
    found = estimate([[True, False], [True]])
    assert math.isnan(found.error_over_samples) and found.error_over_questions > 0


@pytest.mark.parametrize("outcomes", [[1.0], [0.0], [0.1, 0.1, 0.4]])
def test_equal_rates_have_no_error_over_questions(outcomes: list[float]) -> None:
    for size in (1, 2, 5, 1000):
        found = estimate([outcomes] * size)
        assert math.isnan(found.error_over_questions) and found.mean == pytest.approx(statistics.fmean(outcomes))


@pytest.mark.parametrize(
    "values", [[[1e308] * 2, [1e308] * 2], [[-1e200, 1e200], [0.0, 5.0]], [[math.inf] * 2, [1.0] * 2]]
)
def test_rewards_whose_sums_are_infinite_are_no_error(values: list[list[float]]) -> None:
    found = estimate(values)
    assert not math.isfinite(found.mean) or not math.isfinite(found.error_over_samples)


def test_a_question_without_values_takes_no_part_and_of_none_there_is_no_mean() -> None:
    assert estimate([[], [1.0], [], [0.0]]) == estimate([[1.0], [0.0]])
    assert estimate([[1.0], []]).num_questions == 1
    nothing = estimate([[], []])
    assert nothing.num_questions == 0 and math.isnan(nothing.mean)
