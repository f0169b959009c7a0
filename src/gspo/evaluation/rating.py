"""The CodeForces rating of a model, by CodeElo (arXiv 2501.01257) without the mistakes in docs/guides/rating.md."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gspo.errors import UserError, writable
from gspo.evaluation.contests import Contest

Attempts = Mapping[tuple[int, str], Sequence[bool]]  # by contest and index: whether each try passed

MAX_TRIES, CONFIDENCE = 8, 0.95  # tries at a problem in one run; what the interval claims
_GRID = np.linspace(-3000.0, 7000.0, 501)  # ratings at which the bootstrap knows the expected rank


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place that one run of a model would have had in one contest.

    Example: Placement(contest=2024, rerun=0, num_humans=8000, rank=2501.5, rating=1630.2, solved={"A": 1}, …)
    """

    contest: int
    name: str
    division: str  # as the name says it: "Div. 1 + Div. 2"; empty where it says nothing
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
    confidence: float = CONFIDENCE
    seed: int  # of the bootstrap
    num_reruns: int
    num_tries: int  # at each problem in each run, counted in the order in which they were made
    placements: Sequence[Placement]  # of each run in each contest
    left_out: Mapping[int, str]  # contests that do not count, and why
    note: str  # why there is no interval, or none with an end


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


def rate(contests: Sequence[Contest], attempts: Attempts, *, seed: int = 0, num_resamples: int = 2000) -> Rating:
    """The rating with which a player's expected ranks in the contests add up to those of the model's runs.

    It is the R of Σ_c Σ_i 1/(1 + 10^((R − R_ci)/400)) = Σ_c (rank_c − 1), the maximum likelihood of all comparisons
    with humans. The rank of several runs in a contest is their mean.
    """
    counted = [own for own in contests if any((own.id, index) in attempts for index in own.problems)]
    left_out = {own.id: "none of its problems was tried" for own in contests if own not in counted}
    num_tries = len(next(iter(attempts.values())))
    num_reruns = math.ceil(num_tries / MAX_TRIES)
    placements = [place(own, attempts, rerun=rerun) for own in counted for rerun in range(num_reruns)]
    observed = np.array([own.rank - 1 for own in placements]).reshape(-1, num_reruns).mean(1)
    ratings = [contest.ratings[contest.ratings != 0] for contest in counted]
    rating = rating_of_rank(np.concatenate(ratings), 1 + observed.sum())
    curves = np.array([_expected_before(_GRID, own) for own in ratings])
    weights = np.random.default_rng(seed).multinomial(len(curves), [1 / len(curves)] * len(curves), num_resamples)
    low, high, note = _interval(curves, observed, rating, weights)
    return Rating(
        rating=rating,
        low=low,
        high=high,
        seed=seed,
        num_reruns=num_reruns,
        num_tries=min(num_tries, MAX_TRIES),
        placements=placements,
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
    return Placement(
        contest=contest.id,
        name=contest.name,
        division=" + ".join(re.findall(r"Div\. ?\d", contest.name)),
        rerun=rerun,
        num_humans=int(has_rating.sum()),
        rank=rank,
        rating=rating_of_rank(contest.ratings[has_rating], rank),
        solved={index: place + 1 for index, place in zip(contest.problems, places, strict=True) if place >= 0},
        num_attempted=sum(is_tried),
        num_problems=len(tries),
    )


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
