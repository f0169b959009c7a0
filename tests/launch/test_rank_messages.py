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


def test_the_others_wait_for_what_rank_0_tells_them_and_get_it_in_its_order(came_to: Any) -> None:
    heard = [["word", [1, [2]]], ["word", []]]
    assert came_to("told") == ["told", heard, heard]


def test_the_others_end_with_what_rank_0_ends_with(came_to: Any) -> None:
    assert came_to("ended") == ["the outcome"] * 3


def test_an_error_of_rank_0_ends_the_others_in_silence(came_to: Any) -> None:
    first, *others = [result[:2] for result in came_to("first fails")]
    assert first == ["ValueError", "of rank 0"]
    assert others == [["OtherRankError", "of rank 0"]] * 2


@pytest.mark.parametrize("job", ["first is stopped", "first is stopped meanwhile"])
def test_where_rank_0_is_stopped_all_are_once_a_verb_under_way_has_ended(came_to: Any, job: str) -> None:
    assert [result[:2] for result in came_to(job)] == [["Stopped", "15"]] * 3


@pytest.mark.parametrize("work", ["give", "take a while", "sample"])
def test_all_ranks_run_a_verb_of_rank_0s_and_it_has_the_results_of_all(came_to: Any, work: str) -> None:
    assert came_to(f"verb: {work}") == [[*range(8 if work == "sample" else 3)]] * 3


@pytest.mark.parametrize(
    ("job", "first"), [("one fails", 1), ("all fail", 0), ("one fails within", 1), ("verb: one fails", 1)]
)
def test_where_one_of_all_fails_all_do_and_the_first_says_it(came_to: Any, job: str, first: int) -> None:
    kinds = [kind for kind, _, _ in came_to(job)]
    assert kinds == ["ValueError" if own == first else "OtherRankError" for own in range(3)]
    assert came_to(job)[first][1] == f"of rank {first}"
    assert all(is_of_all for _, _, is_of_all in came_to(job))


@pytest.mark.parametrize(("job", "failing"), [("one cannot load", 1), ("none can load", 0)])
def test_a_rank_that_cannot_load_its_part_says_why_and_the_others_are_silent(
    came_to: Any, job: str, failing: int
) -> None:
    assert came_to("loads") == ["loaded with a tokenizer"] * 3
    assert [kind for kind, _, _ in came_to(job)] == [
        "UserError" if own == failing else "OtherRankError" for own in range(3)
    ]
    assert came_to(job)[failing][1] == f"model.path: no file on rank {failing}"


def test_where_one_cannot_sample_rank_0_says_why_and_all_end(came_to: Any) -> None:
    what = "rank 2 could not sample: ValueError: of rank 2"
    assert came_to("verb: one cannot sample") == [["RunError", what, True], *[["OtherRankError", what, True]] * 2]


@pytest.mark.parametrize("job", ["one fails alone", "verb: one fails alone", "verb: first fails alone"])
def test_an_error_that_nobody_expects_is_not_kept_back_where_ranks_may_wait(came_to: Any, job: str) -> None:
    failing = 0 if "first" in job else 1
    assert came_to(job)[failing] == ["ValueError", f"of rank {failing}", False]
    others = [kind for own, (kind, _, _) in enumerate(came_to(job)) if own != failing]
    assert {*others} <= {"LostRankError", "OtherRankError"}


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


@pytest.mark.parametrize("work", ["one is stopped", "one is stopped in sampling"])
def test_a_signal_to_one_stops_all_within_a_verb_and_they_can_still_do_something_together(
    came_to: Any, work: str
) -> None:
    assert came_to(f"verb: {work}") == [["Stopped", "15", True]] * 3


def test_rank_0_tries_an_optimiser_on_shared_parameters_without_the_others(came_to: Any) -> None:
    heard = [["notes", [[]]], 0 + 1 + 2]
    assert came_to("tries") == [[None, 0 + 1 + 2], heard, heard]


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


@pytest.mark.parametrize(
    ("job", "error"),
    [("loses one", ["LostRankError", "rank 2 is gone"]), ("first is interrupted again", ["KeyboardInterrupt", ""])],
)
def test_ranks_of_which_one_is_lost_or_ends_at_once_do_nothing_together_any_more(
    came_to: Any, job: str, error: list[str]
) -> None:
    """Not even tell each other so: each comes upon it by itself."""
    assert came_to(job)[0] == [*error, False]
    assert all("rank 0 has given no sign of life" in said for _, said, _ in came_to(job)[1:])
