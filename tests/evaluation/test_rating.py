"""The CodeForces rating: by hand, against simulated players of known strength, and what bad files say."""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from benchmarks.rating import FINE, contest_of, simulate

from gspo.errors import UserError
from gspo.evaluation.rating import (
    Contest,
    collect_attempts,
    place,
    rate,
    rating_of_rank,
    read_contests,
    read_problems,
)


def expected_rank(ratings: Sequence[float], rating: float) -> float:
    return 1 + sum(1 / (1 + 10 ** ((rating - other) / 400)) for other in ratings)


def ratings_of_players(
    strength: float, number: int, problems: Sequence[Any], *, num_humans: int = 40
) -> list[dict[str, Any]]:
    dice = np.random.default_rng(round(strength))
    return [
        rate(
            *simulate(strength, dice, problems, num_humans=num_humans),
            seed=seed,
            num_resamples=300,
        )
        for seed in range(number)
    ]


def save(directory: Path, contests: Sequence[Contest]) -> None:
    """The contests in the layout of the site's API, and a problem of two tests for each index."""
    problems = []
    for contest in contests:
        folder = directory / "contests" / str(contest.id)
        folder.mkdir(parents=True)
        changes = [
            {"contestId": contest.id, "handle": f"human{number}", "oldRating": int(rating), "newRating": 1}
            for number, rating in enumerate(contest.ratings)
        ]
        (folder / "ratings.json").write_text(json.dumps({"status": "OK", "result": changes}))
        (folder / "standings.json").write_text(json.dumps({"status": "OK", "result": standings_of(contest)}))
        for index in contest.problems:
            tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "4\n"}]
            problems.append({"contest": contest.id, "index": index, "statement": "Add.", "tests": tests, "seconds": 2})
    (directory / "problems.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))


def standings_of(contest: Contest) -> Mapping[str, Any]:
    worths = [{} if math.isnan(worth) else {"points": worth} for worth in contest.max_points]
    problems = [{"index": index} | worth for index, worth in zip(contest.problems, worths, strict=True)]
    rows = [
        {
            "party": {"participantType": "CONTESTANT", "members": [{"handle": f"human{number}"}]},
            "problemResults": [
                {"points": float(is_solved), "rejectedAttemptCount": int(wrong)}
                for is_solved, wrong in zip(contest.solved[number], contest.wrong_tries[number], strict=True)
            ],
        }
        for number in range(len(contest.ratings))
    ]
    return {"contest": {"id": contest.id, "name": contest.name}, "problems": problems, "rows": rows}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two small contests, of the Codeforces kind and of the ICPC kind."""
    ratings = np.array([2100.0, 1500.0, 900.0])
    first = contest_of(ratings, ratings, np.array([800.0, 1600.0]), 7, max_points=500.0)
    save(tmp_path, [first, contest_of(ratings, ratings, np.array([1000.0]), 12)])
    return tmp_path


def test_the_rating_of_a_rank_is_the_one_at_which_it_is_expected() -> None:
    dice = random.Random(0)
    for _ in range(20):
        ratings = [float(dice.randint(400, 3500)) for _ in range(dice.randint(1, 50))]
        rating = dice.uniform(-200, 4000)
        assert rating_of_rank(np.array(ratings), expected_rank(ratings, rating)) == pytest.approx(rating, abs=1e-3)


def test_no_finite_rating_explains_the_first_rank_or_one_behind_all() -> None:
    ratings = np.array([1000.0, 2000.0])
    assert rating_of_rank(ratings, 1.0) == math.inf and rating_of_rank(ratings, 3.0) == -math.inf


@pytest.mark.parametrize("strength", [800, 1700, 2800])
def test_a_players_rating_comes_back_without_bias_and_within_the_interval_as_often_as_it_claims(strength: int) -> None:
    number = 100
    found = ratings_of_players(strength, number, [FINE] * 30)
    error = stdev(own["rating"] for own in found) / math.sqrt(number)
    assert abs(fmean(own["rating"] for own in found) - strength) < 3 * error
    num_within = sum(own["low"] <= strength <= own["high"] for own in found)
    assert abs(num_within - 0.95 * number) <= 3 * math.sqrt(0.95 * 0.05 * number)


def test_ten_contests_of_a_weak_player_suffice_for_most_of_what_the_interval_claims() -> None:
    """Its ranks are skewed: of these players, intervals by percentiles hold fewer than 85 in 100."""
    found = ratings_of_players(800, 100, [FINE] * 10)
    assert sum(own["low"] <= 800 <= own["high"] for own in found) > 87


@pytest.mark.parametrize("strength", [800, 2800])
def test_the_published_mean_over_contests_is_biased_away_from_the_middle(strength: int) -> None:
    """Whatever the rank: each contest's own R is a curved function of it, and cut at the bounds."""
    found = ratings_of_players(strength, 40, [FINE] * 20)
    means = [fmean(min(max(placement["rating"], 0), 3300) for placement in own["contests"]) for own in found]
    bias, error = fmean(means) - strength, stdev(means) / math.sqrt(len(means))
    assert bias < -50 - 3 * error if strength == 800 else bias > 50 + 3 * error


def ranked(num_solved: int, **changes: Any) -> Any:
    """A player among four humans who solved 3, 2, 1 and 0 of three problems."""
    performances = np.array([4.0, 3.0, 2.0, 1.0])
    contest = replace(contest_of(performances, 1000 + 100 * performances, np.array([1.5, 2.5, 3.5])), **changes)
    attempts = {(1, f"P{number}"): (number < num_solved,) for number in range(3)}
    return place(contest, attempts)


def test_a_rank_counts_from_1_and_a_tie_half() -> None:
    assert [ranked(solved)["rank"] for solved in range(4)] == [4.5, 3.5, 2.5, 1.5]


def test_wrong_tries_cost_points_and_break_ties_where_the_problem_is_solved_and_nothing_elsewhere() -> None:
    performances = np.array([3.0, 2.0])
    for max_points in (500.0, math.nan):
        contest = contest_of(performances, 1000 + performances, np.array([1.0, 9.0]), max_points=max_points)
        contest = replace(contest, wrong_tries=np.array([[2, 5], [1, 0]]))
        for num_wrong, rank in enumerate([1, 1.5, 2.5, 3, 3]):
            attempts = {(1, "P0"): (False,) * num_wrong + (True,), (1, "P1"): (False,) * 8}
            assert place(contest, attempts)["rank"] == rank


def test_a_solved_problem_is_worth_30_percent_however_many_tries_it_took() -> None:
    contest = contest_of(np.array([3.0]), np.array([1500.0]), np.array([1.0]), max_points=500.0)
    late = replace(contest, wrong_tries=np.array([[8]]))  # 150 points, and not 100
    assert place(late, {(1, "P0"): (False,) * 7 + (True,)})["rank"] == 1.5


def test_a_problem_that_the_model_was_not_given_counts_for_nobody() -> None:
    contest = contest_of(np.array([4.0, 3.0]), np.array([1600.0, 1500.0]), np.array([1.0, 3.5]))
    placement = place(contest, {(1, "P0"): (True,)})
    assert placement["rank"] == 2 and (placement["num_attempted"], placement["num_problems"]) == (1, 2)
    assert place(contest, {(1, "P0"): (True,), (1, "P1"): (False,)})["rank"] == 2.5


def test_humans_whose_rating_is_not_known_yet_do_not_count() -> None:
    placement = ranked(0, ratings=np.array([1400.0, 0.0, 1200.0, 0.0]))
    assert placement["num_humans"] == 2 and placement["rank"] == 3


def test_all_that_a_rating_was_computed_from_is_reported_and_the_same_seed_gives_the_same() -> None:
    contests, attempts = simulate(1500, np.random.default_rng(1), [FINE] * 6, num_humans=40)
    attempts = {key: (False, *passed) for key, passed in attempts.items() if key[0] != 3}
    found = rate(contests, attempts, seed=5)
    assert found == rate(contests, attempts, seed=5) != rate(contests, attempts, seed=6)
    assert found["left_out"] == {"3": "none of its problems was tried"} and found["num_tries"] == 2
    assert [placement["contest"] for placement in found["contests"]] == [1, 2, 4, 5, 6]
    assert set(found["contests"][2]["solved"].values()) == {2} and found["contests"][2]["division"] == "Div. 1 + Div. 2"


def test_more_than_8_tries_are_runs_whose_mean_rank_counts() -> None:
    contests, _ = simulate(1500, np.random.default_rng(2), [FINE] * 5, num_humans=40)
    good = {(contest.id, index): [i < 40] for contest in contests for i, index in enumerate(contest.problems)}
    bad = {key: [int(key[1][1:]) < 30] for key in good}
    alone = [rate(contests, {key: own * 8 for key, own in run.items()}) for run in (good, bad)]
    both = rate(contests, collect_attempts(judged({key: good[key] * 8 + bad[key] * 8 for key in good})))
    assert both["num_reruns"] == 2 and both["num_tries"] == 8
    for rerun, run in enumerate(alone):
        ranks = [own["rank"] for own in both["contests"] if own["rerun"] == rerun]
        assert ranks == [own["rank"] for own in run["contests"]]
    assert alone[1]["rating"] < both["rating"] < alone[0]["rating"]


def judged(attempts: Mapping[tuple[int, str], Sequence[bool]]) -> Iterator[Mapping[str, Any]]:
    return ({"contest": contest, "index": index, "passed": own} for (contest, index), own in attempts.items())


@pytest.mark.parametrize(
    ("num_contests", "performance", "note"),
    [
        (1, 1500, "no interval: there is one contest"),
        (2, 1500, "no end of the interval: too few contests"),
        (8, 9999, "no finite rating: before every human of every contest"),
        (8, -9999, "no finite rating: behind every human of every contest"),
    ],
)
def test_where_there_is_no_interval_the_note_says_why(num_contests: int, performance: float, note: str) -> None:
    humans = [np.random.default_rng(contest).normal(1500, 300, 50) for contest in range(num_contests)]
    contests = [contest_of(own, own, np.array([0.0, *FINE]), number) for number, own in enumerate(humans)]
    attempts = {
        (own.id, index): (performance > hard,)
        for own in contests
        for index, hard in zip(own.problems, [0.0, *FINE], strict=True)
    }
    found = rate(contests, attempts)
    assert found["note"] == note and not math.isfinite(found["high"] - found["low"])
    assert math.isfinite(found["rating"]) == (abs(performance) < 9999)


def test_a_model_that_is_mostly_before_all_humans_has_an_interval_without_an_upper_end() -> None:
    ratings = np.arange(1000.0, 2000.0, 50.0)
    contests = [contest_of(ratings, ratings, np.arange(1001.0, 2100.0, 50.0), number) for number in range(4)]
    attempts = {(own.id, index): (own.id > 0 or index < "P10",) for own in contests for index in own.problems}
    found = rate(contests, attempts)
    assert -math.inf < found["low"] < found["rating"] < found["high"] == math.inf and "percentile" in found["note"]


def test_a_model_that_solves_nothing_ties_with_the_humans_who_did_not_either() -> None:
    contests = [
        contest_of(np.arange(5.0), 1000 + np.arange(5.0) * 100, np.array([2.5]), number) for number in (1, 2, 3)
    ]
    found = rate(contests, {(number, "P0"): (False,) * 8 for number in (1, 2, 3)})
    assert {own["rank"] for own in found["contests"]} == {1 + 2 + 1.5} and math.isfinite(found["rating"])


def test_files_are_read_as_the_contests_that_were_saved(data: Path) -> None:
    first, second = read_contests(data)
    assert (first.id, second.id) == (7, 12) and list(first.problems) == ["P0", "P1"]
    assert first.max_points.tolist() == [500, 500] and math.isnan(second.max_points[0])
    assert first.ratings.tolist() == [2100, 1500, 900]
    assert first.solved.tolist() == [[True, True], [True, False], [True, False]]
    rows = read_problems(data, [first, second])
    assert [(row["contest"], row["index"]) for row in rows] == [(7, "P0"), (7, "P1"), (12, "P0")]
    assert (
        rows[0]["prompt"] == "Add."
        and "statement" not in rows[0]
        and rows[0]["tests"][1]["output"] == "4\n"
        and rows[0]["seconds"] == 2
    )


def test_rows_of_teams_and_of_virtual_participants_are_no_humans(data: Path) -> None:
    path = data / "contests" / "7" / "standings.json"
    answer = json.loads(path.read_text())["result"]
    answer["rows"][0]["party"]["participantType"] = "VIRTUAL"
    answer["rows"][1]["party"]["members"].append({"handle": "friend"})
    path.write_text(json.dumps(answer))  # without its envelope, too
    contest = read_contests(data)[0]
    assert contest.ratings.tolist() == [900]


def changed(path: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Changes the result in a file of the API."""

    def apply(data: Path) -> None:
        file = data / path
        result = json.loads(file.read_text())["result"]
        file.write_text(json.dumps({"status": "OK", "result": change(result)}))

    return apply


def rewritten(path: str, text: str) -> Callable[[Path], None]:
    def apply(data: Path) -> None:
        (data / path).write_text(text)

    return apply


STANDINGS, RATINGS, PROBLEMS = "contests/7/standings.json", "contests/7/ratings.json", "problems.jsonl"
PROBLEM = {"contest": 7, "index": "P0", "statement": "Add.", "tests": [{"input": "", "output": ""}]}


@pytest.mark.parametrize(
    ("break_it", "where", "what"),
    [
        (lambda data: (data / STANDINGS).unlink(), STANDINGS, "No such file"),
        (lambda data: (data / "contests/7").rename(data / "contests/seven"), PROBLEMS, "contest 7 has no problem"),
        (lambda data: (data / "contests").rename(data / "contest"), "contests", "no contest is here"),
        (rewritten(STANDINGS, ""), STANDINGS, "Expecting value"),
        (rewritten(STANDINGS, "[]"), STANDINGS, "this cannot be used"),
        (rewritten(RATINGS, '{"status": "FAILED", "comment": "not rated"}'), RATINGS, '"comment": "not rated"'),
        (changed(RATINGS, lambda _: []), STANDINGS, "none of the 0 humans"),
        (changed(RATINGS, lambda own: [own[0] | {"oldRating": 0}]), STANDINGS, "none of the 1 humans"),
        (changed(STANDINGS, lambda own: own | {"rows": []}), STANDINGS, "none of the 3 humans"),
        (changed(STANDINGS, lambda own: own | {"rows": [3]}), STANDINGS, "'int' object"),
        (changed(STANDINGS, lambda own: own | {"problems": own["problems"][:1]}), STANDINGS, "shape (3,1)"),
        (changed(RATINGS, lambda own: [own[0] | {"oldRating": "high"}]), RATINGS, "'high'"),
        (changed(RATINGS, lambda own: [{"handle": "human0"}]), RATINGS, "KeyError: 'oldRating'"),
        (rewritten(PROBLEMS, ""), PROBLEMS, "no problem is here"),
        (rewritten(PROBLEMS, f"{json.dumps(PROBLEM)}\n{json.dumps(PROBLEM)}"), PROBLEMS, "given before"),
        (rewritten(PROBLEMS, json.dumps(PROBLEM | {"contest": "7"})), PROBLEMS, "contest '7' has no problem 'P0'"),
        (rewritten(PROBLEMS, json.dumps(PROBLEM | {"contest": 8})), PROBLEMS, "contest 8 has no problem 'P0'"),
        (rewritten(PROBLEMS, json.dumps(PROBLEM | {"index": "Q"})), PROBLEMS, "contest 7 has no problem 'Q'"),
        (rewritten(PROBLEMS, json.dumps(PROBLEM | {"statement": None})), PROBLEMS, "it needs a statement"),
        (rewritten(PROBLEMS, json.dumps(PROBLEM | {"tests": []})), PROBLEMS, "it needs tests"),
        (
            rewritten(PROBLEMS, json.dumps(PROBLEM | {"tests": [{"input": ""}]})),
            PROBLEMS,
            "column 'tests' holds no usable tests",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_is_wrong_and_how_to_mend_it(
    data: Path, break_it: Callable[[Path], None], where: str, what: str
) -> None:
    break_it(data)
    with pytest.raises(UserError) as caught:
        read_problems(data, read_contests(data))
    assert str(caught.value.where).startswith(str(data / where)) and what in caught.value.what and caught.value.fix


@pytest.mark.parametrize(
    ("passed", "what"),
    [
        ({}, "the numbers of tries are none"),
        ({(1, "A"): []}, "the numbers of tries are 0"),
        ({(1, "A"): [True], (1, "B"): [True] * 2}, "the numbers of tries are 1, 2"),
        ({(1, "A"): [True] * 12}, "the numbers of tries are 12"),
    ],
)
def test_judged_rows_that_are_no_attempts_are_refused(passed: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        collect_attempts(judged(passed))


def test_the_tries_of_several_rows_of_a_problem_follow_one_another() -> None:
    rows = [*judged({(1, "A"): [False]}), *judged({(1, "A"): [True, False]})]
    assert collect_attempts(rows) == {(1, "A"): [False, True, False]}
