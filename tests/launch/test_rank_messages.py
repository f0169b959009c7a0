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

    def read(job: str) -> list[Any]:
        paths = [directory / f"{job} {own}" for own in range(3)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    return read


def test_all_get_what_rank_0_has_made(came_to: Any) -> None:
    assert came_to("made") == ["made by 0"] * 3


def test_an_error_of_rank_0_is_raised_on_all_and_said_by_it(came_to: Any) -> None:
    silent = ["OtherRankError", "of rank 0", True]
    assert came_to("first fails") == [["ValueError", "of rank 0", True], silent, silent]


@pytest.mark.parametrize(("job", "first"), [("one fails", 1), ("all fail", 0), ("one fails within", 1)])
def test_where_one_of_all_fails_all_do_and_the_first_says_it(came_to: Any, job: str, first: int) -> None:
    kinds = [kind for kind, _, _ in came_to(job)]
    assert kinds == ["ValueError" if own == first else "OtherRankError" for own in range(3)]
    assert came_to(job)[first][1] == f"of rank {first}"
    assert all(is_of_all for _, _, is_of_all in came_to(job))


def test_an_error_that_nobody_expects_is_not_kept_back_where_ranks_may_wait(came_to: Any) -> None:
    first, failed, _ = came_to("one fails alone")
    assert failed[:2] == ["ValueError", "of rank 1"] and first[0] in ("LostRankError", "OtherRankError")


@pytest.mark.parametrize(
    ("job", "said"), [("no tracker", "needs the package"), ("not to be shared", "cannot be sharded")]
)
def test_what_every_rank_finds_wrong_is_said_by_the_first(came_to: Any, job: str, said: str) -> None:
    assert [kind for kind, _, _ in came_to(job)] == ["UserError", "OtherRankError", "OtherRankError"]
    assert said in came_to(job)[0][1]


def test_where_none_fails_each_has_its_own(came_to: Any) -> None:
    assert came_to("none fails") == ["made by 0", "made by 1", "made by 2"]


def test_a_signal_to_one_stops_all(came_to: Any) -> None:
    assert came_to("stopped") == [[15, True]] * 3


def test_rank_0_tries_an_optimiser_on_shared_parameters_without_the_others(came_to: Any) -> None:
    assert came_to("tries") == [[[], 0 + 1 + 2]] * 3


def test_a_rank_that_takes_long_is_waited_for(came_to: Any) -> None:
    assert came_to("slow") == [[0, 1, 2]] * 3


def test_a_rank_that_keeps_the_others_waiting_is_named_by_one(came_to: Any) -> None:
    first, _, other = came_to("stuck")
    assert first[0] == "LostRankError"
    assert "rank 1 has kept the others waiting" in first[1]
    assert "it has come to exchange 3 with them, rank 0 to 4" in first[1]
    assert other[0] == "OtherRankError"


def test_what_a_rank_that_is_gone_would_have_said_is_not_waited_for(came_to: Any) -> None:
    first, gone, _ = came_to("silent")
    assert gone is None
    assert first[0] == "LostRankError" and "rank 1 has given no sign of life" in first[1]


def test_ranks_of_which_one_is_lost_do_nothing_together_any_more(came_to: Any) -> None:
    """Not even tell each other so: each comes upon it by itself."""
    assert came_to("loses one")[0] == ["LostRankError", "rank 2 is gone", False]
    assert all("rank 0 has given no sign of life" in said for _, said, _ in came_to("loses one")[1:])
