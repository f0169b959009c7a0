"""The order of queries is a function of the step, fair to every query, without doubles in a step."""

from collections import Counter

import pytest

from gspo.queries.order import query_indices

SIZES = [(8, 8), (10, 4), (11, 8), (13, 6), (16, 8), (21, 10), (64, 64), (100, 7), (101, 50)]


def steps_of(
    num_queries: int, per_step: int, *, seed: int = 0, shuffle: bool = True, count: int = 60
) -> list[list[int]]:
    return [
        query_indices(step, num_queries=num_queries, queries_per_step=per_step, seed=seed, shuffle=shuffle)
        for step in range(count)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_queries", "per_step"), SIZES)
def test_each_query_once_an_epoch_and_never_twice_a_step(num_queries: int, per_step: int, shuffle: bool) -> None:
    steps = steps_of(num_queries, per_step, shuffle=shuffle)
    assert all(len(set(step)) == per_step for step in steps)
    stream = [index for step in steps for index in step]
    for start in range(0, len(stream) - num_queries + 1, num_queries):
        assert sorted(stream[start : start + num_queries]) == list(range(num_queries))


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    forward = steps_of(23, 8)
    backward = [
        query_indices(step, num_queries=23, queries_per_step=8, seed=0, shuffle=True) for step in reversed(range(60))
    ]
    assert forward == backward[::-1]


def test_epochs_and_seeds_differ() -> None:
    epochs = [steps_of(32, 8)[start : start + 4] for start in (0, 4)]
    assert epochs[0] != epochs[1]
    assert steps_of(32, 8, seed=1) != steps_of(32, 8, seed=2)


def test_every_query_can_open_and_close_an_epoch() -> None:
    # Queries that give way at an epoch's start must not pile up in one place.
    firsts = Counter(step[0] for step in steps_of(20, 9, count=2000))
    assert len(firsts) == 20
    assert max(firsts.values()) < 3 * min(firsts.values())


def test_without_shuffling_the_data_comes_in_its_order() -> None:
    assert steps_of(5, 2, shuffle=False, count=4) == [[0, 1], [2, 3], [4, 0], [1, 2]]


@pytest.mark.parametrize(
    ("num_queries", "per_step", "seed", "steps"),
    [
        (10, 4, 0, [[4, 6, 2, 7], [3, 5, 9, 0], [8, 1, 9, 3], [1, 8, 7, 6], [0, 4, 2, 5]]),
        (5, 3, 1, [[4, 0, 1], [2, 3, 4], [0, 1, 2]]),
    ],
)
def test_a_run_that_was_started_earlier_goes_on_with_the_same_order(
    num_queries: int, per_step: int, seed: int, steps: list[list[int]]
) -> None:
    assert steps_of(num_queries, per_step, seed=seed, count=len(steps)) == steps
