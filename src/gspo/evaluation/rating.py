"""The CodeForces rating of a model: its rank among the humans of past contests, and the rating that explains it.

The procedure is CodeElo's (arXiv 2501.01257) without its mistakes; docs/guides/rating.md says which, and why.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo.errors import UserError, writable
from gspo.evaluation.contests import Contest

Attempts = Mapping[tuple[int, str], Sequence[bool]]  # by contest and index of the problem: whether each try passed

MAX_TRIES = 8  # at a problem, in one run
_NO_DEVIATION = 1e-6  # below it, only rounding is left of a standard error
_GRID = np.linspace(-3000.0, 7000.0, 501)  # ratings at which the bootstrap knows the expected rank


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one run of a model would have come in one contest.

    Example: Placement(contest=2024, rerun=0, num_humans=8000, rank=2501.5, rating=1630.2, solved={"A": 1, "B": 3}, …)
    """

    contest: int
    name: str
    division: str
    rerun: int
    num_humans: int  # those it is ranked among
    rank: float  # from 1, a tie counts half
    rating: float  # that explains the rank; infinite of who is before or behind all humans
    solved: Mapping[str, int]  # by index: the number of the try that passed, from 1
    num_attempted: int
    num_problems: int


@dataclass(frozen=True, kw_only=True)
class Rating:
    """The rating of a model, its confidence interval, and all that they were computed from.

    Example: Rating(rating=1630.2, low=1551.0, high=1704.8, placements=(…), left_out={}, note="", …)
    """

    rating: float  # infinite of who is before, or behind, every human of every contest
    low: float  # NaN, as `high`, where there is no interval: `note` says why
    high: float
    confidence: float
    seed: int  # of the bootstrap
    num_reruns: int
    num_tries: int  # at each problem in each run, counted in the order in which they were made
    placements: Sequence[Placement]  # of each run in each contest
    left_out: Mapping[int, str]  # contests that do not count, and why
    note: str  # why there is no interval, or none with an end


def collect_attempts(rows: Iterable[Mapping[str, Any]]) -> Attempts:
    """The attempts in judged rows: `contest`, `index`, and `passed`, a list of bools in the order of the tries.

    The tries of rows with the same problem follow one another. More than 8 tries are runs of 8, one after another.
    Raises UserError for another number, and for one that differs between problems.
    """
    attempts: dict[tuple[int, str], list[bool]] = {}
    for row in rows:
        attempts.setdefault((row["contest"], row["index"]), []).extend(row["passed"])
    numbers = sorted({len(passed) for passed in attempts.values()})
    if len(numbers) > 1 or any((number > MAX_TRIES and number % MAX_TRIES) or not number for number in numbers):
        fix = f"try each problem equally often: up to {MAX_TRIES} times, or a multiple of it for more than one run"
        raise UserError(f"the numbers of tries are {', '.join(map(str, numbers))}", where="judged rows", fix=fix)
    return attempts


def rate(
    contests: Sequence[Contest],
    attempts: Attempts,
    *,
    seed: int = 0,
    confidence: float = 0.95,
    num_resamples: int = 2000,
) -> Rating:
    """The rating with which a player's expected ranks in the contests add up to the ranks of the model's runs.

    It is the R of Σ_c Σ_i 1/(1 + 10^((R − R_ci)/400)) = Σ_c (rank_c − 1), which is also the maximum likelihood of all
    comparisons with humans. The rank of several runs in a contest is their mean. Raises UserError where no contest
    counts, and for attempts at a problem that is in none.
    """
    known = {(contest.id, index) for contest in contests for index in contest.problems}
    if unknown := sorted(set(attempts) - known):
        what = f"no contest has the problem {unknown[0][0]}{unknown[0][1]}"
        raise UserError(what, where="judged rows", fix="judge the rows of read_problems for the same contests")
    tried = {contest for contest, _ in attempts}
    left_out = {own.id: "nobody had a rating before it" for own in contests if not len(_known_ratings(own))}
    left_out |= {own.id: "none of its problems was tried" for own in contests if own.id not in tried}
    counted = [contest for contest in contests if contest.id not in left_out]
    if not counted:
        fix = "add contests and problems to the data"
        raise UserError(f"no contest counts: {left_out}", where="contests", fix=fix)
    num_tries = len(next(iter(attempts.values())))
    num_reruns = math.ceil(num_tries / MAX_TRIES)
    placements = [[place(contest, attempts, rerun=rerun) for rerun in range(num_reruns)] for contest in counted]
    ratings = [_known_ratings(contest) for contest in counted]
    observed = np.array([fmean(placement.rank - 1 for placement in row) for row in placements])
    curves = np.array([_expected_before(_GRID, *np.unique(own, return_counts=True)) for own in ratings])
    rating = rating_of_rank(np.concatenate(ratings), 1 + observed.sum())
    low, high, note = _interval(curves, observed, rating, confidence, seed, num_resamples)
    return Rating(
        rating=rating,
        low=low,
        high=high,
        confidence=confidence,
        seed=seed,
        num_reruns=num_reruns,
        num_tries=min(num_tries, MAX_TRIES),
        placements=tuple(placement for row in placements for placement in row),
        left_out=left_out,
        note=note,
    )


def plain_rating(rating: Rating) -> dict[str, Any]:
    """A rating as JSON has it: null for what is no finite number; `contests` are the runs in each contest."""
    tree = {name: value for name, value in vars(rating).items() if name != "placements"}
    tree["left_out"] = {str(contest): why for contest, why in rating.left_out.items()}
    tree["contests"] = [{"id": placement.contest, **vars(placement)} for placement in rating.placements]
    return dict(writable(tree))


def place(contest: Contest, attempts: Attempts, *, rerun: int = 0) -> Placement:
    """The rank that a run of the model would have had in the contest, and the rating that explains it alone."""
    window = slice(rerun * MAX_TRIES, (rerun + 1) * MAX_TRIES)
    tries = {index: attempts.get((contest.id, index), ())[window] for index in contest.problems}
    solved = {index: list(passed).index(True) + 1 for index, passed in tries.items() if True in passed}
    ratings = _known_ratings(contest)
    rank = _rank_without_time(contest, solved, np.array([bool(passed) for passed in tries.values()]))
    return Placement(
        contest=contest.id,
        name=contest.name,
        division=contest.division,
        rerun=rerun,
        num_humans=len(ratings),
        rank=rank,
        rating=rating_of_rank(ratings, rank),
        solved=solved,
        num_attempted=sum(map(bool, tries.values())),
        num_problems=len(contest.problems),
    )


def rating_of_rank(ratings: Float[np.ndarray, "N"], rank: float) -> float:
    """The R with 1 + Σ_i 1/(1 + 10^((R − R_i)/400)) = rank (2501.01257), by ever finer grids.

    Infinite for a rank that no finite R explains: 1 or less, N + 1 or more.
    """
    if rank <= 1 or rank >= len(ratings) + 1:
        return math.inf if rank <= 1 else -math.inf
    values, counts = np.unique(ratings, return_counts=True)
    low, high = -10_000.0, 10_000.0
    while high - low > 1e-6:
        grid = np.linspace(low, high, 65)
        expected = 1 + _expected_before(grid, values, counts)  # the higher R, the fewer are before
        above = min(max(int(np.sum(expected >= rank)), 1), len(grid) - 1)
        low, high = float(grid[above - 1]), float(grid[above])
    return (low + high) / 2


def _known_ratings(contest: Contest) -> Float[np.ndarray, "M"]:
    """Without those who had none: the site shows 0 of them, which says nothing of their strength."""
    return contest.ratings[contest.ratings != 0]


def _expected_before(
    grid: Float[np.ndarray, "G"], values: Float[np.ndarray, "V"], counts: Int[np.ndarray, "V"]
) -> Float[np.ndarray, "G"]:
    """How many humans are expected before a player of each rating of the grid, Σ_i 1/(1 + 10^((R − R_i)/400)).

    The humans are given as their V different ratings and how many have each: contests are large, and ratings integers.
    """
    return 1 / (1 + np.exp((grid[:, None] - values) * (math.log(10) / 400))) @ counts.astype(float)


def _rank_without_time(contest: Contest, solved: Mapping[str, int], attempted: Bool[np.ndarray, "P"]) -> float:
    """From 1, a tie counts half; all by the problems that the model tried and by wrong tries: a model has no time."""
    own_solved = np.array([[index in solved for index in contest.problems]])
    own_wrong = np.array([[solved.get(index, 1) - 1 for index in contest.problems]])
    points, wrong = _scores(contest.max_points, contest.solved & attempted, contest.wrong_tries)
    own_points, own_wrong_sum = _scores(contest.max_points, own_solved, own_wrong)
    is_tied = (points == own_points) & (wrong == own_wrong_sum)
    is_before = (points > own_points) | ((points == own_points) & (wrong < own_wrong_sum))
    return 1 + float((is_before + is_tied / 2)[contest.ratings != 0].sum())


def _scores(
    max_points: Float[np.ndarray, "P"], solved: Bool[np.ndarray, "N P"], wrong_tries: Int[np.ndarray, "N P"]
) -> tuple[Float[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """Points without time, and the wrong tries that break ties.

    A wrong try costs 50 points, down to 30 % of the problem's; a problem without points counts 1, and its wrong tries
    break ties. Only those at solved problems cost anything.
    """
    has_points = ~np.isnan(max_points)
    most = np.where(has_points, max_points, 1.0)
    left = np.where(has_points, np.maximum(0.3 * most, most - 50 * wrong_tries), 1.0)
    # Equal results must be equal numbers, whatever the order of the sum.
    return (left * solved).sum(1).round(6), (wrong_tries * (solved & ~has_points)).sum(1)


def _interval(
    curves: Float[np.ndarray, "C G"],
    observed: Float[np.ndarray, "C"],
    rating: float,
    confidence: float,
    seed: int,
    num_resamples: int,
) -> tuple[float, float, str]:
    """Bootstrap-t over the C contests, of the R with Σ_c curves_c(R) = Σ_c observed_c: its ends, and a note.

    Ranks are skewed: with few contests, percentile intervals cover less than they claim (docs/guides/rating.md).
    """
    num_contests = len(observed)
    if num_contests == 1:
        return math.nan, math.nan, "no interval: there is one contest"
    if not math.isfinite(rating):
        side = "before" if rating > 0 else "behind"
        return math.nan, math.nan, f"no finite rating: {side} every human of every contest"
    own_deviation = _deviation(curves, observed, np.array([rating]), np.ones((1, num_contests), dtype=int))[0]
    if own_deviation < _NO_DEVIATION:
        return math.nan, math.nan, "no interval: every contest gives the same rating"
    weights = np.random.default_rng(seed).multinomial(num_contests, [1 / num_contests] * num_contests, num_resamples)
    tail = (1 - confidence) / 2
    ratings = _solve(weights.astype(float) @ curves, weights @ observed)
    if not np.isfinite(ratings).all():
        low, high = np.quantile(ratings, [tail, 1 - tail], method="inverted_cdf")
        return float(low), float(high), "percentile interval: some resamples have no finite rating"
    deviations = _deviation(curves, observed, ratings, weights)
    # A resample of one contest alone has no deviation: it says that there are too few, by an infinite end.
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.nan_to_num(
            (ratings - rating) / np.where(deviations < _NO_DEVIATION, 0, deviations), posinf=math.inf, neginf=-math.inf
        )
    low_error = np.quantile(errors, tail, method="lower")
    high_error = np.quantile(errors, 1 - tail, method="higher")
    low, high = float(rating - high_error * own_deviation), float(rating - low_error * own_deviation)
    return low, high, "" if math.isfinite(high - low) else "no end of the interval: too few contests"


def _solve(curves: Float[np.ndarray, "B G"], observed: Float[np.ndarray, "B"]) -> Float[np.ndarray, "B"]:
    """Where each curve falls to what was observed; infinite where it does not on the grid."""
    pairs = zip(curves, observed, strict=True)
    return np.array(
        [np.interp(-observation, -curve, _GRID, left=-math.inf, right=math.inf) for curve, observation in pairs]
    )


def _deviation(
    curves: Float[np.ndarray, "C G"],
    observed: Float[np.ndarray, "C"],
    ratings: Float[np.ndarray, "B"],
    weights: Int[np.ndarray, "B C"],
) -> Float[np.ndarray, "B"]:
    """The standard error of each resample's R: the sandwich estimate, √Σ_c w_c U_c² / |Σ_c w_c U_c'|."""
    slopes = np.gradient(curves, _GRID, axis=1)
    surprises = np.stack([np.interp(ratings, _GRID, curve) for curve in curves], axis=1) - observed
    slopes_there = np.stack([np.interp(ratings, _GRID, slope) for slope in slopes], axis=1)
    return np.sqrt((weights * surprises**2).sum(1)) / abs((weights * slopes_there).sum(1))
