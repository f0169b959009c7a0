"""Compare two models on the questions of a suite that both were asked: paired, so that hard questions cancel."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from gspo.errors import UserError, listed
from gspo.evaluation.held_out import Estimate, estimate
from gspo.recipe.yaml_text import leaves

Evaluation = Mapping[str, Any]  # as evaluation.json has it
Questions = Mapping[str, Sequence[float]]  # whether the judged responses to each pass
# Settings that may differ: the data's digest is compared.
_FREE = ("samples", "about", "queries.path", "queries.limit", "engine")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference in how often two models pass, over the questions that both have judged responses to.

    Example: Comparison(difference=estimate([[0.5], [0.0]]), won=("gsm8k:7",), lost=(), sign_test=1.0, num_left_out=0)
    """

    difference: Estimate  # of the pass rates, second − first
    won: tuple[str, ...]  # the questions that the second passes more often
    lost: tuple[str, ...]  # less often
    sign_test: float  # two-sided p: as uneven a split of won and lost by chance; McNemar's exact test of single samples
    num_left_out: int  # questions that only one of the two has judged responses to


def compare(first: Evaluation, second: Evaluation, suite: str) -> Comparison:
    """The paired difference of two evaluations on a suite of both; their numbers of samples may differ.

    The error over questions is the standard deviation (Q − 1) of the questions' differences / √Q. The error over
    samples is (1/Q) √Σ_q (s²_1q/n_1q + s²_2q/n_2q), the two models' samples taken as independent. Prompts may differ
    as chat templates do. UserError where the data or the settings are not the same, or no question is common.
    """
    trees, where = [tree["suites"][suite] for tree in (first, second)], f"suite {suite}"
    if len({tree["data"]["sha256"] for tree in trees}) > 1:
        shown = " and ".join(f"{tree['data']['path']} ({tree['data']['num_rows']} rows)" for tree in trees)
        what = f"the two models were evaluated on different data: {shown}"
        raise UserError(what, where=where, fix="evaluate both models on the same data")
    pairs = differences(*(tree["settings"] for tree in trees))
    if odd := [f"{key} {before} and {after}" for key, (before, after) in pairs.items() if key not in _FREE]:
        fix = "evaluate both models with the same settings"
        raise UserError(f"the settings differ: {listed(odd)}", where=where, fix=fix)
    before, after = judged = [_questions(tree) for tree in trees]
    if not (common := [query for query in before if query in after]):
        fix = "evaluate both models on the same questions"
        raise UserError("no question has judged responses of both models", where=where, fix=fix)
    gains = {query: fmean(after[query]) - fmean(before[query]) for query in common}
    errors = [estimate([verdicts[query] for query in common]).error_over_samples for verdicts in judged]
    difference = estimate([[gain] for gain in gains.values()])
    won = tuple(query for query, gain in gains.items() if gain > 0)
    lost = tuple(query for query, gain in gains.items() if gain < 0)
    return Comparison(
        difference=replace(difference, error_over_samples=math.hypot(*errors)),
        won=won,
        lost=lost,
        sign_test=sign_test(len(won), len(lost)),
        num_left_out=len(before.keys() ^ after.keys()),
    )


def sign_test(num_won: int, num_lost: int) -> float:
    """min(1, 2 P(X ≤ min(won, lost))) of X ~ Binomial(won + lost, 1/2): both directions are equally likely."""
    size = num_won + num_lost
    ways = sum(math.comb(size, number) for number in range(min(num_won, num_lost) + 1))
    return min(1.0, 2 * ways / 2**size)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The dotted keys in which two trees differ, with both values as JSON."""
    before, after = leaves(first), leaves(second)
    pairs = {key: (before.get(key, "null"), after.get(key, "null")) for key in before | after}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _questions(suite: Mapping[str, Any]) -> Questions:
    """1 for each judged response that passes, 0 for one that does not, by the first query with its prompt."""
    questions, first = dict[str, list[float]](), dict[str, str]()
    for response in suite["responses"]:
        query = first.setdefault(response["prompt"], response["query"])
        if response["passed"] is not None:
            questions.setdefault(query, []).append(float(response["passed"]))
    return questions
