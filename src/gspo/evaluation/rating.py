"""The CodeForces rating of a model, by CodeElo (arXiv 2501.01257) without the mistakes in docs/guides/rating.md.

Contests come from files: problems with tests, standings and ratings as the site's API gives them.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo.errors import UserError
from gspo.queries.row import RawRow, read_rows
from gspo.reward.code_tests import TEST_COLUMNS, read_tests

Attempts = Mapping[tuple[int, str], Sequence[bool]]  # by contest and index: whether each try passed

MAX_TRIES, CONFIDENCE = 8, 0.95  # tries at a problem in one run; what the interval claims
_GRID = np.linspace(-3000.0, 7000.0, 501)  # ratings at which the bootstrap knows the expected rank


@dataclass(frozen=True, kw_only=True, eq=False)
class Contest:
    """A contest with its P problems, and its N rated humans in the order of the standings.

    Example: Contest(id=2024, name="Codeforces Round 980 (Div. 2)", problems=("A", "B"), …)
    """

    id: int
    name: str
    problems: Sequence[str]  # the index of each
    max_points: Float[np.ndarray, "P"]  # NaN of a problem that counts 1, as in Educational and Div. 3 rounds
    ratings: Float[np.ndarray, "N"]  # shown before the contest; 0 of who had none
    solved: Bool[np.ndarray, "N P"]
    wrong_tries: Int[np.ndarray, "N P"]  # of a problem that is solved: before it was


def read_contests(directory: Path) -> list[Contest]:
    """The contests in `directory`/contests/<id>/{standings,ratings}.json, by id; UserError where one is odd."""
    folder = directory / "contests"
    folders = [path for path in folder.glob("*") if path.is_dir() and path.name.isdecimal()]
    if not folders:
        raise UserError("no contest is here", where=str(folder), fix="make a folder for each, such as contests/2024")
    return [_read_contest(path) for path in sorted(folders, key=lambda path: int(path.name))]


def read_problems(directory: Path, contests: Sequence[Contest]) -> list[RawRow]:
    """The rows of `directory`/problems.jsonl with the statement as prompt; UserError for one that cannot be used."""
    path, rows = directory / "problems.jsonl", list[RawRow]()
    left: list[Any] = [(contest.id, index) for contest in contests for index in contest.problems]
    for number, row in enumerate(read_rows(str(path)), start=1):
        problem, where = (row.get("contest"), row.get("index")), f"{path}, row {number}"
        fix = "correct the row, or remove it"
        if problem not in left:
            what = f"contest {problem[0]!r} has no problem {problem[1]!r}, or the row was given before"
            raise UserError(what, where=where, fix=fix)
        left.remove(problem)
        if not isinstance(prompt := row.pop("statement", None), str):
            raise UserError("it needs a statement", where=where, fix=fix)
        if not {*TEST_COLUMNS}.isdisjoint(row) and read_tests(row, where=where) is None:
            raise UserError("it needs tests", where=where, fix=fix)
        rows.append({**row, "prompt": prompt})
    if not rows:
        raise UserError("no problem is here", where=str(path), fix="write one problem a line")
    return rows


def _read_contest(folder: Path) -> Contest:
    """The rows count of who took part officially and alone, and is in ratings.json."""
    with _answer(folder / "ratings.json", "contest.ratingChanges") as changes:
        ratings = {change["handle"]: float(change["oldRating"]) for change in changes}
    with _answer(folder / "standings.json", "contest.standings") as standings:
        rows, problems = dict[str, Any](), standings["problems"]
        for row in standings["rows"]:
            handles = [member["handle"] for member in row["party"]["members"]]
            if row["party"]["participantType"] == "CONTESTANT" and len(handles) == 1 and handles[0] in ratings:
                rows[handles[0]] = row["problemResults"]
        if not any(ratings[handle] for handle in rows):
            raise ValueError(f"none of the {len(ratings)} humans of ratings.json has a row and had a rating before")
        shape, results = (len(rows), len(problems)), [result for row in rows.values() for result in row]
        return Contest(
            id=int(folder.name),
            name=str(standings["contest"]["name"]),
            problems=tuple(problem["index"] for problem in problems),
            max_points=np.array([float(problem.get("points", math.nan)) for problem in problems]),
            ratings=np.array([ratings[handle] for handle in rows]),
            solved=np.array([result["points"] > 0 for result in results]).reshape(shape),
            wrong_tries=np.array([int(result["rejectedAttemptCount"]) for result in results]).reshape(shape),
        )


@contextmanager
def _answer(path: Path, method: str) -> Iterator[Any]:
    """Read a saved answer of the API, with or without its envelope of status and result; name the file in any fault."""
    content = b""
    try:
        answer = json.loads(content := path.read_bytes())
        yield answer["result"] if "status" in answer else answer
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = f"this cannot be used: {type(error).__name__}: {error}; it begins {content[:80]!r}"
        fix = f"save the whole answer of the API's method {method} there, of a rated contest that is over"
        raise UserError(what, where=str(path), fix=fix) from None


def collect_attempts(rows: Iterable[Mapping[str, Any]]) -> Attempts:
    """The attempts in judged rows: `contest`, `index`, and `passed`, a list of bools in the order of the tries.

    More than 8 at a problem are runs of 8. UserError for another number, and for one that differs between problems.
    """
    attempts: dict[tuple[int, str], list[bool]] = {}
    for row in rows:
        attempts.setdefault((row["contest"], row["index"]), []).extend(row["passed"])
    numbers = sorted({len(passed) for passed in attempts.values()})
    if len(numbers) != 1 or not numbers[0] or numbers[0] % min(numbers[0], MAX_TRIES):
        what = f"the numbers of tries are {', '.join(map(str, numbers)) or 'none'}"
        fix = f"try each problem equally often: up to {MAX_TRIES} times, or a multiple of it for several runs"
        raise UserError(what, where="judged rows", fix=fix)
    return attempts


def rate(
    contests: Sequence[Contest], attempts: Attempts, *, seed: int = 0, num_resamples: int = 2000
) -> dict[str, Any]:
    """The rating with which a player's expected ranks in the contests add up to those of the model's runs.

    It is the R of Σ_c Σ_i 1/(1 + 10^((R − R_ci)/400)) = Σ_c (rank_c − 1), the maximum likelihood of all comparisons
    with humans. The rank of several runs in a contest is their mean. Returned is what evaluation.json has, with
    NaN and infinite numbers for its null: `contests` are the runs in each contest.
    """
    counted = [own for own in contests if any((own.id, index) in attempts for index in own.problems)]
    left_out = {str(own.id): "none of its problems was tried" for own in contests if own not in counted}
    num_tries = len(next(iter(attempts.values())))
    num_reruns = math.ceil(num_tries / MAX_TRIES)
    placements = [place(own, attempts, rerun=rerun) for own in counted for rerun in range(num_reruns)]
    observed = np.array([own["rank"] - 1 for own in placements]).reshape(-1, num_reruns).mean(1)
    ratings = [contest.ratings[contest.ratings != 0] for contest in counted]
    rating = rating_of_rank(np.concatenate(ratings), 1 + observed.sum())
    curves = np.array([_expected_before(_GRID, own) for own in ratings])
    weights = np.random.default_rng(seed).multinomial(len(curves), [1 / len(curves)] * len(curves), num_resamples)
    low, high, note = _interval(curves, observed, rating, weights)
    return {
        "rating": rating,  # infinite of who is before, or behind, every human of every contest
        "low": low,  # NaN, as `high`, where there is no interval: `note` says why
        "high": high,
        "confidence": CONFIDENCE,
        "seed": seed,  # of the bootstrap
        "num_reruns": num_reruns,
        "num_tries": min(num_tries, MAX_TRIES),  # at each problem in each run, in their order
        "left_out": left_out,  # contests that do not count, and why
        "note": note,  # why there is no interval, or none with an end
        "contests": placements,
    }


def place(contest: Contest, attempts: Attempts, *, rerun: int = 0) -> dict[str, Any]:
    """The rank that a run of the model would have had in the contest, and the rating that explains it alone.

    A wrong try at a solved problem costs 50 points, down to 30 % of the problem's; one without points counts 1,
    and its wrong tries break ties. Nobody has a time, as the model has none. Humans of rating 0 do not count.
    """
    tries = [list(attempts.get((contest.id, index), ())) for index in contest.problems]
    tries = [own[rerun * MAX_TRIES : (rerun + 1) * MAX_TRIES] for own in tries]
    places = [own.index(True) if True in own else -1 for own in tries]  # of the try that passed
    has_rating, is_tried = contest.ratings != 0, [bool(own) for own in tries]
    solved = np.vstack([np.array(places) >= 0, contest.solved[has_rating] & is_tried])  # the model's row is first
    wrong = np.vstack([places, contest.wrong_tries[has_rating]]) * solved
    has_points = ~np.isnan(contest.max_points)
    most = np.where(has_points, contest.max_points, 1.0)
    left = np.where(has_points, np.maximum(0.3 * most, most - 50 * wrong), 1.0)
    # Equal results must be equal numbers, whatever the order of the sum.
    points, ties = (left * solved).sum(1).round(6), (wrong * ~has_points).sum(1)
    is_before = (points > points[0]) | ((points == points[0]) & (ties < ties[0]))
    is_equal = (points == points[0]) & (ties == ties[0])  # as the model itself is
    rank = 1 + float(is_before.sum() + (is_equal.sum() - 1) / 2)
    return {
        "id": contest.id,
        "contest": contest.id,
        "name": contest.name,
        "division": " + ".join(re.findall(r"Div\. ?\d", contest.name)),  # empty where the name says nothing
        "rerun": rerun,
        "num_humans": int(has_rating.sum()),  # those it is ranked among
        "rank": rank,  # from 1, a tie counts half
        "rating": rating_of_rank(contest.ratings[has_rating], rank),  # that explains the rank
        "solved": {index: place + 1 for index, place in zip(contest.problems, places, strict=True) if place >= 0},
        "num_attempted": sum(is_tried),
        "num_problems": len(tries),
    }


def rating_of_rank(ratings: Float[np.ndarray, "N"], rank: float) -> float:
    """The R with 1 + Σ_i 1/(1 + 10^((R − R_i)/400)) = rank, by ever finer grids; infinite where there is none."""
    if not 1 < rank < len(ratings) + 1:
        return math.inf if rank <= 1 else -math.inf
    low, high = -10_000.0, 10_000.0
    while high - low > 1e-6:
        grid = np.linspace(low, high, 65)
        above = int(np.clip(np.sum(1 + _expected_before(grid, ratings) >= rank), 1, 64))
        low, high = float(grid[above - 1]), float(grid[above])
    return (low + high) / 2


def _expected_before(grid: Float[np.ndarray, "G"], ratings: Float[np.ndarray, "N"]) -> Float[np.ndarray, "G"]:
    """Return how many humans are expected before a player of each rating R: Σ_i 1/(1 + 10^((R − R_i)/400))."""
    values, counts = np.unique(ratings, return_counts=True)  # contests are large, and ratings integers
    return 1 / (1 + np.exp((grid[:, None] - values) * (math.log(10) / 400))) @ counts.astype(float)


def _interval(
    curves: Float[np.ndarray, "C G"], observed: Float[np.ndarray, "C"], rating: float, draws: Int[np.ndarray, "B C"]
) -> tuple[float, float, str]:
    """Bootstrap-t over the C contests, of the R with Σ_c curves_c(R) = Σ_c observed_c: its ends, and a note.

    The standard error of a resample's R is the sandwich estimate, √Σ_c w_c U_c² / |Σ_c w_c U_c'|.
    """
    if len(observed) == 1:
        return math.nan, math.nan, "no interval: there is one contest"
    if not math.isfinite(rating):
        side = f"{'before' if rating > 0 else 'behind'} every human of every contest"
        return math.nan, math.nan, f"no finite rating: {side}"
    pairs = zip(draws.astype(float) @ curves, draws @ observed, strict=True)
    solved = [np.interp(-rank, -curve, _GRID, left=-math.inf, right=math.inf) for curve, rank in pairs]
    ratings = np.array([rating, *solved])  # of the contests themselves, then of each resample
    weights = np.vstack([np.ones(len(observed), int), draws])
    surprises = np.stack([np.interp(ratings, _GRID, curve) for curve in curves], axis=1) - observed
    slopes = np.stack([np.interp(ratings, _GRID, np.gradient(curve, _GRID)) for curve in curves], axis=1)
    # A resample of one contest alone has no deviation: it says that there are too few, by an infinite end.
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations = np.sqrt((weights * surprises**2).sum(1)) / abs((weights * slopes).sum(1))
        deviations[deviations < 1e-6] = 0  # only rounding is left of them
        errors = np.nan_to_num((ratings[1:] - rating) / deviations[1:], posinf=math.inf, neginf=-math.inf)
    if not deviations[0]:
        return math.nan, math.nan, "no interval: every contest gives the same rating"
    tails = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
    if not np.isfinite(ratings).all():
        low, high = map(float, np.quantile(ratings[1:], tails, method="inverted_cdf"))
        return low, high, "percentile interval: some resamples have no finite rating"
    low = float(rating - np.quantile(errors, tails[1], method="higher") * deviations[0])
    high = float(rating - np.quantile(errors, tails[0], method="lower") * deviations[0])
    return low, high, "" if math.isfinite(high - low) else "no end of the interval: too few contests"
