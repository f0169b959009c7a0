"""A number over the steps: mean and spread of seeds, what is missing, what lies in lists."""

import math
from typing import Any

import numpy
import pytest
from tests.report.page.lines import seeds_of, steps_of

from gspo.report.page.series import Series, from_to, length_of, places_of, series_of


def series(*seeds: list[Any], name: str = "x", place: tuple[int, ...] = ()) -> Series:
    found = series_of(seeds_of(*(steps_of(name, values) for values in seeds)), name, *place)
    assert found is not None
    return found


def test_of_several_seeds_the_mean_and_the_deviation_with_one_less_are_drawn() -> None:
    values = numpy.random.default_rng(0).normal(3.0, 2.0, (5, 8))
    found = series(*values.tolist())
    assert list(found.steps) == list(range(1, 9))
    assert numpy.allclose(numpy.array(found.means, dtype=float), values.mean(axis=0))
    assert numpy.allclose(numpy.array(found.deviations, dtype=float), values.std(axis=0, ddof=1))
    assert found.has_deviations


def test_one_seed_has_no_deviation() -> None:
    found = series([1.0, 2.5])
    assert (found.means, found.deviations, found.has_deviations) == ([1.0, 2.5], [None, None], False)


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf, ..., "text", [1.0], {"a": 1}])
def test_a_step_without_a_number_is_a_gap(nothing: Any) -> None:
    found = series([1.0, nothing, 3.0])
    assert found.means == [1.0, None, 3.0]


def test_a_seed_without_a_number_takes_no_part_in_the_mean() -> None:
    found = series([1.0, None, None], [3.0, 4.0, math.nan], [5.0, 8.0, ...])
    assert found.means == [3.0, 6.0, None]
    assert found.deviations == [2.0, pytest.approx(math.sqrt(8)), None]


def test_seeds_of_different_lengths_are_averaged_while_they_last() -> None:
    found = series([1.0], [3.0, 4.0])
    assert (found.means, found.deviations) == ([2.0, 4.0], [pytest.approx(math.sqrt(2)), None])


def test_without_a_single_number_there_is_no_curve() -> None:
    arm = seeds_of(steps_of("x", [None, ..., math.nan]))
    assert series_of(arm, "x") is None and series_of(arm, "absent") is None
    assert series_of(seeds_of([]), "x") is None


def test_step_0_is_there_only_with_a_number() -> None:
    log = [{"step": 0, "e": 0.5}, {"step": 1, "x": 1.0}, {"step": 2, "x": 2.0, "e": 0.75}]
    at_all, at_some = series_of(seeds_of(log), "x"), series_of(seeds_of(log), "e")
    assert at_all is not None and list(at_all.steps) == [1, 2]
    assert at_some is not None and (list(at_some.steps), at_some.means) == ([0, 1, 2], [0.5, None, 0.75])


def test_whole_numbers_and_truths_are_numbers() -> None:
    assert series([1, True, 0]).means == [1.0, 1.0, 0.0]


def test_a_list_is_read_by_place_and_one_that_is_shorter_has_a_gap() -> None:
    lists: list[Any] = [[1.0, 2.0, 3.0], [4.0], None, [5.0, None, 6.0], []]
    arm = seeds_of(steps_of("x", lists))
    assert length_of(arm, "x") == 3
    assert series(lists, place=(0,)).means == [1.0, 4.0, None, 5.0, None]
    assert series(lists, place=(1,)).means == [2.0, None, None, None, None]
    assert series(lists, place=(2,)).means == [3.0, None, None, 6.0, None]
    assert series_of(arm, "x", 3) is None


def test_lists_in_lists_are_read_by_both_places() -> None:
    lists: list[Any] = [[[1.0, 2.0], [3.0]], [[4.0, 5.0], None]]
    assert places_of(seeds_of(steps_of("x", lists)), "x") == {(0, 0), (0, 1), (1, 0), (1,)}
    assert series(lists, place=(0, 1)).means == [2.0, 5.0]
    assert series(lists, place=(1, 0)).means == [3.0, None]
    assert series_of(seeds_of(steps_of("x", lists)), "x", 1) is None


def test_a_scalar_is_no_list() -> None:
    arm = seeds_of(steps_of("x", [1.0, 2.0]))
    assert length_of(arm, "x") == 0 and places_of(arm, "x") == set()
    assert series_of(arm, "x", 0) is None
    assert length_of(arm, "absent") == 0


def test_the_longest_list_of_any_seed_counts() -> None:
    assert length_of(seeds_of(steps_of("x", [[1.0]]), steps_of("x", [[1.0, 2.0]])), "x") == 2


def test_without_its_gaps_a_curve_has_the_steps_that_have_a_number() -> None:
    found = series([None, 1.0, 2.0, ..., 4.0], [None, 3.0, ..., math.nan, 8.0]).without_gaps
    assert list(found.steps) == [2, 3, 5] and list(found.means) == [2.0, 2.0, 6.0]
    assert list(found.deviations) == [pytest.approx(math.sqrt(2)), None, pytest.approx(math.sqrt(8))]
    whole = series([1.0, 2.0])
    assert (list(whole.without_gaps.steps), list(whole.without_gaps.means)) == (whole.steps, whole.means)


@pytest.mark.parametrize(
    ("seeds", "told"),
    [
        ([[None, 0.25, 0.5, 0.12345678, ...]], "0.25 → 0.1235"),
        ([[1.0, 2.0], [3.0, 4.5]], "2 ± 1.4 → 3.25 ± 1.8"),
        ([[1.0, 2.0], [3.0]], "2 ± 1.4 → 2"),
        ([[None, 2.0], [math.inf, 4.0]], "3 ± 1.4"),
        ([[5.0]], "5"),
        ([[None, ...]], "–"),
        ([[]], "–"),
    ],
)
def test_a_number_is_told_from_its_first_to_its_last(seeds: list[list[Any]], told: str) -> None:
    assert from_to(seeds_of(*(steps_of("x", values) for values in seeds)), "x") == told
