"""What each mistake of a rating costs, and how often its interval holds the truth: simulated players of known strength.

python -m benchmarks.rating [--players 200]

All, the model too, perform in a contest with their strength plus a Gumbel number, so that the probability of being
before another is exactly that of the ratings. They solve what is easier than their performance.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from gspo.evaluation.rating import Attempts, Contest, place, rate, rating_of_rank

SCALE = 400 / math.log(10)  # two Gumbel numbers of this scale differ by a logistic one
FINE = np.arange(-1000.0, 5000.0, 100.0)  # difficulties so near one another that ties are rare
FEW = {"21, 150 apart": (600, 3700, 150), "9, 300 apart": (600, 3300, 300), "6, 400 apart": (800, 3200, 400)}
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # the head, and the rows
STRENGTHS = (800, 1400, 2000, 2800)


def contest_of(
    performances: Any, ratings: Any, difficulties: Any, contest_id: int = 1, max_points: float = math.nan
) -> Contest:
    """Humans who solve what is easier than their performance, the better of equals in less time."""
    order = np.argsort(-performances)
    solved = performances[order, None] > difficulties
    return Contest(
        id=contest_id,
        name=f"Codeforces Round {contest_id} (Div. 1 + Div. 2)",
        problems=tuple(f"P{number}" for number in range(len(difficulties))),
        max_points=np.full(len(difficulties), max_points),
        ratings=ratings[order],
        solved=solved,
        wrong_tries=np.zeros(solved.shape, dtype=int),
    )


def simulate(
    strength: float, dice: np.random.Generator, problems: Sequence[Any], *, num_humans: int = 250
) -> tuple[list[Contest], Attempts]:
    """A contest for each of the lists of difficulties, and one try of a player of that strength at every problem."""
    contests, attempts = [], {}
    for contest_id, difficulties in enumerate(problems, start=1):
        ratings = dice.normal(1600, 500, num_humans).round(-1) + 1  # nobody is shown with 0
        contest = contest_of(ratings + dice.gumbel(0, SCALE, num_humans), ratings, difficulties, contest_id)
        contests.append(contest)
        performance = strength + dice.gumbel(0, SCALE)
        for index, difficulty in zip(contest.problems, difficulties, strict=True):
            attempts[contest_id, index] = (bool(performance > difficulty),)
    return contests, attempts


def with_each_mistake(contests: Sequence[Contest], attempts: Attempts, dice: np.random.Generator) -> dict[str, float]:
    """The rating, and what it is with one mistake of the published procedure and all else right."""
    ratings = [contest.ratings for contest in contests]
    placements = [place(contest, attempts) for contest in contests]
    num_before = sum(own["rank"] - 1 for own in placements)
    # 6 in 10 of those within 150 points of 1400 are 13 % of all.
    shown = [np.where((abs(own - 1400) <= 150) & (dice.random(len(own)) < 0.6), 0.0, own) for own in ratings]
    bounded = (min(max(own["rating"], 0.0), rated.max() + 99) for own, rated in zip(placements, ratings, strict=True))
    return {
        "gspo": rate(contests, attempts, num_resamples=2)["rating"],
        "rank from 0": rating_of_rank(np.concatenate(ratings), 1 + num_before - len(contests)),
        "mean of R, between the bounds": fmean(bounded),
        "13 % of the humans, of about 1400, shown as 0": rating_of_rank(np.concatenate(shown), 1 + num_before),
    }


def percentiles(contests: Sequence[Contest], attempts: Attempts, dice: np.random.Generator) -> tuple[float, float]:
    """The 95 % interval that `rate` does not give: by percentiles of the resampled ratings, to 10 points."""
    grid = np.arange(-2000.0, 6000.0, 10.0)
    observed = np.array([place(contest, attempts)["rank"] - 1 for contest in contests])
    values = [np.unique(contest.ratings, return_counts=True) for contest in contests]
    expected = np.array([1 / (1 + 10 ** ((grid[:, None] - own) / 400)) @ counts for own, counts in values])
    weights = dice.multinomial(len(contests), np.full(len(contests), 1 / len(contests)), 1000).astype(float)
    ratings = grid[np.minimum((weights @ expected > (weights @ observed)[:, None]).sum(1), len(grid) - 1)]
    return float(np.quantile(ratings, 0.025)), float(np.quantile(ratings, 0.975))


def contest_problems(dice: np.random.Generator) -> Any:
    """The difficulties of 6 to 9 problems, evenly from one for nearly all to one for the best."""
    return np.linspace(dice.uniform(700, 1300), dice.uniform(2400, 3500), dice.integers(6, 10))


def mistakes(players: range) -> Table:
    """How far each mistake alone shifts the rating: 20 contests of 250 humans, problems near one another."""
    columns = []
    for strength in STRENGTHS:
        dice = np.random.default_rng(strength)
        found = [with_each_mistake(*simulate(strength, dice, [FINE] * 20), dice) for _ in players]
        columns.append({name: deviation([own[name] for own in found], strength) for name in found[0]})
    return ["strength", *map(str, STRENGTHS)], [[name, *(own[name] for own in columns)] for name in columns[0]]


def few_problems(players: range) -> Table:
    """How far time, which humans have and a model has not, shifts the rating: 20 contests of 250 humans."""
    rows = []
    for name, bounds in FEW.items():
        cells = []
        for strength in STRENGTHS:
            dice = np.random.default_rng(strength)
            cases = [simulate(strength, dice, [np.arange(*bounds)] * 20) for _ in players]
            cells.append(deviation([rate(*case, num_resamples=2)["rating"] for case in cases], strength))
        rows.append([name, *cells])
    return ["problems", *map(str, STRENGTHS)], rows


def coverage(players: range) -> Table:
    """How often an interval of 95 % holds the strength, with problems near one another."""
    rows = []
    for num_contests, strength in itertools.product((6, 20, 54), (800, 1500, 2800)):
        dice = np.random.default_rng(num_contests * strength)
        within = np.zeros(2)
        for _ in players:
            case = simulate(strength, dice, [FINE] * num_contests)
            rating = rate(*case)
            both = (percentiles(*case, dice), (rating["low"], rating["high"]))
            within += [low <= strength <= high for low, high in both]
        rows.append([str(num_contests), str(strength), *(f"{100 * share:.0f} %" for share in within / len(players))])
    return ["contests", "strength", "percentile", "bootstrap-t"], rows


def realistic(players: range) -> Table:
    """What the interval holds with as many problems as contests have: 20 contests of 6 to 9 problems each."""
    rows = []
    for strength in STRENGTHS:
        dice = np.random.default_rng(strength)
        found = [rate(*simulate(strength, dice, [contest_problems(dice) for _ in range(20)])) for _ in players]
        within = fmean(own["low"] <= strength <= own["high"] for own in found)
        width = median(own["high"] - own["low"] for own in found)
        rows.append(
            [
                str(strength),
                deviation([own["rating"] for own in found], strength),
                f"{100 * within:.0f} %",
                f"{width:.0f}",
            ]
        )
    return ["strength", "rating", "within the interval", "median width"], rows


def deviation(ratings: Sequence[float], strength: int) -> str:
    """The mean difference to the strength, with its standard error."""
    return f"{fmean(ratings) - strength:+.0f} ± {stdev(ratings) / math.sqrt(len(ratings)):.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of docs/guides/rating.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--players", type=int, default=200, help="of each strength, in each case")
    players = range(parser.parse_args(argv).players)
    for table in (mistakes, few_problems, coverage, realistic):
        head, rows = table(players)
        lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
        print(table.__doc__, "", lines[0], "|" + "---|" * len(head), *lines[1:], "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
