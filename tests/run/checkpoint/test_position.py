"""Positions: their order is the run's, whatever the clock or the alphabet says, and their names say them."""

import itertools
import random

import pytest

from gspo.run.checkpoint.position import Position, position_in_step, position_of


def in_step(
    steps: int, *, updates: int | None = None, sampled: bool = True, scored: bool = True, rounds: int = 0
) -> Position:
    return position_in_step(steps, sampled=sampled, scored=scored, num_updates=updates, rounds=rounds)


IN_ORDER = [  # as a run comes through them
    Position(-1, 0),
    Position(-1, 1),
    Position(-1, 2),
    Position(-1, 10),
    Position(-1, 1_000_000),
    in_step(0, sampled=False, scored=False),
    in_step(0, scored=False),
    in_step(0),
    in_step(0, updates=0),
    in_step(0, updates=1),
    in_step(0, updates=9),
    in_step(0, updates=10),
    in_step(1, sampled=False, scored=False),
    in_step(1, scored=False),
    in_step(9, sampled=False, scored=False),
    in_step(9),
    in_step(9, sampled=False, scored=False, rounds=1),
    in_step(9, scored=False, rounds=1),
    in_step(9, rounds=1),
    in_step(9, sampled=False, scored=False, rounds=9),
    in_step(9, updates=1, rounds=9),
    in_step(10, sampled=False, scored=False),
    in_step(999_999, updates=3),
    in_step(1_000_000, sampled=False, scored=False),
    in_step(10_000_000, sampled=False, scored=False),
]


def test_the_order_is_that_of_the_run() -> None:
    assert sorted(random.Random(0).sample(IN_ORDER, len(IN_ORDER))) == IN_ORDER
    assert all(one < two for one, two in itertools.pairwise(IN_ORDER))


def test_a_name_is_one_positions_and_reads_back_as_it() -> None:
    assert len({position.name for position in IN_ORDER}) == len(IN_ORDER)
    assert [position_of(position.name) for position in IN_ORDER] == IN_ORDER


@pytest.mark.parametrize(
    ("position", "name", "words"),
    [
        (Position(-1, 200), "cold_000200", "step 200 of the cold start"),
        (Position(12), "step_000012", "step 12"),
        (in_step(12, scored=False), "step_000012_sampled", "step 13, sampled"),
        (in_step(12), "step_000012_scored", "step 13, scored"),
        (in_step(12, sampled=False, scored=False, rounds=1), "step_000012_round_2", "step 13, round 2"),
        (in_step(12, rounds=2), "step_000012_round_3_scored", "step 13, round 3, scored"),
        (in_step(12, updates=0), "step_000012_update_0", "step 13, update 0"),
        (in_step(12, updates=2), "step_000012_update_2", "step 13, update 2"),
    ],
)
def test_a_position_is_named_and_said(position: Position, name: str, words: str) -> None:
    assert position.name == name
    assert str(position) == words


@pytest.mark.parametrize(
    "name",
    [
        "unfinished_step_000001",
        "damaged_step_000001",
        "step_000001 copy",
        "step_000001_",
        "step_000001_update_",
        "step_000001_trained",
        "step_000001_round_1",
        "step_000001_round_02_sampled",
        "step_",
        "cold_000001_sampled",
        "step_-00001",
        "step_99",
        "step_0000099",
        "cold_7",
        "model",
        "",
    ],
)
def test_another_name_is_no_position(name: str) -> None:
    assert position_of(name) is None
