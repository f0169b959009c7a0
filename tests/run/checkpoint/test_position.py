"""Positions: their order is the run's, whatever the clock or the alphabet says, and their names say them."""

import itertools
import random
from typing import Any

import pytest

from gspo.run.checkpoint.store import Position, position_of
from gspo.run.progress import Progress
from gspo.types import Batch

IN_ORDER = [  # as a run comes through them
    *(Position(0), Position(0, 1), Position(0, 2)),
    *(Position(1), Position(1, 1), Position(9), Position(9, 1), Position(9, 2)),
    *(Position(10), Position(999_999, 2), Position(1_000_000), Position(10_000_000)),
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
        (Position(0), "step_000000", "step 0"),
        (Position(12), "step_000012", "step 12"),
        (Position(12, 1), "step_000012_batch", "step 13, batch"),
        (Position(12, 2), "step_000012_updated", "step 13, updated"),
    ],
)
def test_a_position_has_a_name_for_its_directory_and_words_for_people(
    position: Position, name: str, words: str
) -> None:
    assert (position.name, str(position)) == (name, words)


@pytest.mark.parametrize(
    "name",
    [
        *("", "step_", "step_12", "step_0000012", "step_000012_", "step_000012_update"),
        *("step_000012_update_2", "step_000012_updated_1", "step_000012_batch_updated"),
        *("step_000012_sampled", "step_000012_scored", "cold_000200", "damaged_step_000012"),
        *("unfinished_step_000012", "step_000012.bak", " step_000012", "step_-00012"),
    ],
)
def test_no_other_name_is_a_positions(name: str) -> None:
    assert position_of(name) is None


def test_progress_is_where_its_step_has_come_to() -> None:
    batch = Batch(groups=())
    report: Any = object()
    assert Progress().position == Position(0)
    assert Progress(steps=3, batch=batch).position == Position(3, 1)
    assert Progress(steps=3, batch=batch, reports=(report, report)).position == Position(3, 2)
