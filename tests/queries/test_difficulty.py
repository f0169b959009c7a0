"""The sampler by difficulty: what it remembers, how often each query comes, and that none is forgotten."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.samples import query_of, sample_of

from gspo.queries.order import FADING, LEAST, drawn_indices, remembered, weights_of
from gspo.types import Group, Query, Score


def group_of(query: Query, *numbers: float | None) -> Group:
    scores = [
        None if number is None else Score(reward=-number, parts={"judge": number, "b": 0.0}) for number in numbers
    ]
    return Group(samples=tuple(sample_of(query, [5], score=score) for score in scores))


def test_the_first_functions_passes_are_remembered_half_of_them_from_the_newest_group() -> None:
    one, two = query_of([4], 1), query_of([5], 2)
    rates = remembered({}, [group_of(one, 1.0, 0.5, None, 0.9)], threshold=0.9, step=3)
    assert rates == {one.id: (pytest.approx(2 / 3), 3)}
    rates = remembered(rates, [group_of(one, 0.0, 0.0), group_of(two, None)], threshold=0.9, step=7)
    assert rates == {one.id: (pytest.approx(1 / 3), 7)}


@pytest.mark.parametrize(
    ("known", "step", "expected"),
    [
        (None, 9, 1.0),
        ((0.5, 9), 9, 1.0),
        ((0.25, 9), 9, 0.75),
        ((1.0, 9), 9, LEAST),
        ((0.0, 9), 9, LEAST),
        ((1.0, 9), 59, 1 - FADING**100),  # p = ½ + ½ f⁵⁰, and 4 p (1 - p) = 1 - f¹⁰⁰
    ],
)
def test_the_weight_is_largest_where_half_passes_and_what_is_not_seen_fades(
    known: Any, step: int, expected: float
) -> None:
    query = query_of([4])
    rates = {} if known is None else {query.id: known}
    assert weights_of([query], rates, step=step) == [pytest.approx(expected)]


def test_a_batch_has_different_queries_drawn_by_their_weights() -> None:
    weights = [1.0, 0.1, 0.5, 0.1, 0.3]
    batches = [drawn_indices(number, weights, queries_per_step=3, seed=0) for number in range(20_000)]
    assert all(len({*batch}) == 3 for batch in batches)
    first, second = Counter(batch[0] for batch in batches), Counter(tuple(batch[:2]) for batch in batches)
    for index, weight in enumerate(weights):
        assert first[index] / len(batches) == pytest.approx(weight / 2, abs=0.015)
    for (one, two), count in second.items():  # without replacement
        expected = weights[one] / 2 * weights[two] / (2 - weights[one])
        assert count / len(batches) == pytest.approx(expected, abs=0.015)


def test_it_depends_on_the_batch_the_seed_and_the_weights_alone() -> None:
    weights = np.linspace(0.1, 1, 40).tolist()
    draw = {key: drawn_indices(key[0], weights, queries_per_step=8, seed=key[1]) for key in ((3, 0), (4, 0), (3, 1))}
    assert len({*map(tuple, draw.values())}) == 3
    assert drawn_indices(3, weights, queries_per_step=8, seed=0) == draw[3, 0]
