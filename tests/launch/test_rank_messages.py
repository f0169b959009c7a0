"""What ranks tell each other: every one of them knows of a failure, and one of them says it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).with_name("message_jobs.py")


@pytest.fixture(scope="module")
def came_to(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By the name of a job: what each of three ranks came to."""
    directory = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, str(JOBS), str(directory)], check=True, timeout=120)
    return lambda job: [json.loads((directory / f"{job} {own}").read_text()) for own in range(3)]


def test_all_get_what_rank_0_has_made(came_to: Any) -> None:
    assert came_to("made") == ["made by 0"] * 3


def test_an_error_of_rank_0_is_raised_on_all_and_said_by_it(came_to: Any) -> None:
    silent = ["OtherRankError", "of rank 0", True]
    assert came_to("first fails") == [["ValueError", "of rank 0", True], silent, silent]


@pytest.mark.parametrize(("job", "first"), [("one fails", 1), ("all fail", 0)])
def test_where_one_of_all_fails_all_do_and_the_first_says_it(came_to: Any, job: str, first: int) -> None:
    kinds = [kind for kind, _, _ in came_to(job)]
    assert kinds == ["ValueError" if own == first else "OtherRankError" for own in range(3)]
    assert came_to(job)[first][1] == f"of rank {first}"


def test_where_none_fails_each_has_its_own(came_to: Any) -> None:
    assert came_to("none fails") == ["made by 0", "made by 1", "made by 2"]


def test_a_signal_to_one_stops_all(came_to: Any) -> None:
    assert came_to("stopped") == [[15, True]] * 3


def test_a_rank_that_takes_long_is_waited_for(came_to: Any) -> None:
    assert came_to("slow") == [[0, 1, 2]] * 3


def test_a_rank_that_keeps_the_others_waiting_is_named_by_one(came_to: Any) -> None:
    first, _, other = came_to("stuck")
    assert first[0] == "LostRankError"
    assert "rank 1 has kept the others waiting" in first[1]
    assert "it has come to exchange 3 with them, rank 0 to 4" in first[1]
    assert other[0] == "OtherRankError"
