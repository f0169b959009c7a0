"""Compare two models on the questions of a suite that both were asked: paired, so that hard questions cancel."""

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from gspo.errors import UserError, listed
from gspo.evaluation.held_out import estimate
from gspo.recipe.yaml_text import leaves

Evaluation = Mapping[str, Any]  # as evaluation.json has it
Questions = Mapping[str, Sequence[float]]  # whether the judged responses to each pass
# Settings that may differ: the data's digest is compared.
_FREE = ("samples", "about", "queries.path", "queries.limit", "engine")


def compare(first: Evaluation, second: Evaluation, suite: str) -> dict[str, Any]:
    """The difference in how often two models pass, second − first, over the questions that both were asked.

    `won` are the questions that the second passes more often, `lost` those less often; `num_left_out` counts
    those that only one of the two has judged responses to. The numbers of samples may differ, and prompts as
    chat templates do. UserError where the data or the settings are not the same, or no question is common.

    The error over questions is the standard deviation (Q − 1) of the questions' differences / √Q. The error over
    samples is (1/Q) √Σ_q (s²_1q/n_1q + s²_2q/n_2q), the two models' samples taken as independent.
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
    return {
        "mean": difference.mean,
        "error_over_questions": difference.error_over_questions,
        "error_over_samples": math.hypot(*errors),
        "num_questions": difference.num_questions,
        "num_left_out": len(before.keys() ^ after.keys()),
        "sign_test": sign_test(len(won), len(lost)),
        "won": won,
        "lost": lost,
    }


def sign_test(num_won: int, num_lost: int) -> float:
    """min(1, 2 P(X ≤ min(won, lost))) of X ~ Binomial(won + lost, 1/2): both directions are equally likely.

    It is the two-sided p of as uneven a split by chance; of single samples McNemar's exact test.
    """
    size = num_won + num_lost
    ways = sum(math.comb(size, number) for number in range(min(num_won, num_lost) + 1))
    return min(1.0, 2 * ways / 2**size)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The dotted keys in which two trees differ, with both values as JSON."""
    before, after = leaves(first), leaves(second)
    pairs = {key: (before.get(key, "null"), after.get(key, "null")) for key in before | after}
    return {key: (was, now) for key, (was, now) in pairs.items() if was != now and not _are_equal_numbers(was, now)}


def _are_equal_numbers(*texts: str) -> bool:
    """Tell whether both are the same number, such as 1 and 1.0."""
    one, other = map(json.loads, texts)
    return type(one) in (int, float) and type(other) in (int, float) and one == other


def _questions(suite: Mapping[str, Any]) -> Questions:
    """1 for each judged response that passes, 0 for one that does not, by the first query with its prompt."""
    questions, first = dict[str, list[float]](), dict[str, str]()
    for response in suite["responses"]:
        query = first.setdefault(response["prompt"], response["query"])
        if response["passed"] is not None:
            questions.setdefault(query, []).append(float(response["passed"]))
    return questions
