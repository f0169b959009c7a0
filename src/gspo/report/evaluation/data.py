"""Evaluations as the page's JSON: numbers of each suite, differences of the models, and what each question got."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import Any

from gspo.errors import UserError, printable
from gspo.evaluation.compare import Evaluation, compare
from gspo.evaluation.journal import EVALUATION_FILE, FORMAT
from gspo.recipe.yaml_text import leaves
from gspo.report.page.data import rounded
from gspo.report.samples import by_query
from gspo.run.plain_files import parsed, read_plain

Response = Mapping[str, Any]
Questions = Mapping[str, Sequence[Response]]  # the responses to each, in the order in which they were sampled

_PROMPT = 120  # characters of it in the table
_NUMBERS = (
    *("pass_at_1", "error_over_questions", "error_over_samples", "reward_mean", "reward_error", "mean_response_tokens"),
    *("truncated_fraction", "num_questions", "num_responses", "num_failed", "num_unjudged"),
    *("seconds_sampling", "seconds_judging"),
)
_RATES = ("0 %", "to 25 %", "to 50 %", "to 75 %", "below 100 %", "100 %", "not judged")


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation that `gspo eval` has written into a directory; UserError where there is none."""
    file, fix = path / EVALUATION_FILE, "name the directory that gspo eval has written"
    try:
        tree = parsed(read_plain(file))
    except OSError as error:
        raise UserError(f"this evaluation cannot be read: {error.strerror}", where=str(file), fix=fix) from None
    if tree is None or (number := tree.get("format")) != FORMAT:
        what = "no JSON" if tree is None else f"no evaluation of format {FORMAT}, but of {number!r}"
        fix = "read it with the gspo that has written it, or evaluate again"
        raise UserError(f"this is {what}", where=str(file), fix=fix)
    return tree


def evaluation_data(evaluations: Sequence[Evaluation], labels: Sequence[str]) -> dict[str, Any]:
    """All that the page shows but the responses and where they lie; the models under these labels."""
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation["suites"])
    return {
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "models": [
            {"label": label, "about": leaves({name: entry for name, entry in evaluation.items() if name != "suites"})}
            for label, evaluation in zip(labels, evaluations, strict=True)
        ],
        "suites": [suite_data(name, evaluations) for name in names],
    }


def suite_data(name: str, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """A suite; null stands for a model that was not evaluated on it."""
    suites = [evaluation["suites"].get(name) for evaluation in evaluations]
    questions = [by_query(suite["responses"] if suite else ()) for suite in suites]
    return {
        "name": name,
        "numbers": [suite and _numbers(suite["numbers"]) for suite in suites],
        "settings": [suite and leaves({"data": suite["data"], **suite["settings"]}) for suite in suites],
        "differences": [None, *(_difference(evaluations[0], other, name) for other in evaluations[1:])],
        "rates": _distribution([[rate(row) for row in rows.values()] for rows in questions], _place_of_rate, _RATES),
        "lengths": _lengths([[response["tokens"] for row in rows.values() for response in row] for rows in questions]),
        "questions": {
            query: [printable(query), beginning, [_result(rows.get(query, ())) for rows in questions]]
            for query, beginning in _beginnings(questions).items()
        },
    }


def rate(responses: Sequence[Response]) -> float | None:
    """The share of the judged responses that passes; None where none is judged."""
    judged = [response["passed"] for response in responses if response["passed"] is not None]
    return fmean(judged) if judged else None


def _numbers(tree: Mapping[str, Any]) -> dict[str, Any]:
    at_k = [[int(k), rounded(value)] for k, value in tree["pass_at_k"].items() if value is not None]
    numbers = {name: rounded(tree[name]) for name in _NUMBERS}
    return {**numbers, "pass_at_k": at_k, "rating": _rating(tree["rating"]) if "rating" in tree else None}


def _rating(tree: Mapping[str, Any]) -> dict[str, Any]:
    """In CodeForces' numbers, with a row for each run in each contest."""
    return {
        **{name: rounded(tree[name]) for name in ("rating", "low", "high", "confidence")},
        "note": tree["note"],
        "contests": [*map(_contest, tree["contests"])],
        "left_out": [*tree["left_out"].items()],
    }


def _contest(tree: Mapping[str, Any]) -> list[str]:
    solved = ", ".join(f"{index} at try {number}" for index, number in tree["solved"].items())
    values = [tree[name] for name in ("rank", "num_humans", "rating")]
    numbers = ["–" if value is None else f"{value:,.6g}" for value in values]
    return [printable(text) for text in (tree["name"], *numbers, solved or "none")]


def _difference(first: Evaluation, second: Evaluation, suite: str) -> dict[str, Any] | None:
    """Of the pass rates, second − first; `why` there is none."""
    if not all(suite in evaluation["suites"] for evaluation in (first, second)):
        return None
    try:
        comparison = compare(first, second, suite)
    except UserError as error:
        return {"why": printable(error.what)}
    return {
        "mean": rounded(comparison.difference.mean),
        "error_over_questions": rounded(comparison.difference.error_over_questions),
        "error_over_samples": rounded(comparison.difference.error_over_samples),
        "num_questions": comparison.difference.num_questions,
        "num_left_out": comparison.num_left_out,
        "sign_test": rounded(comparison.sign_test),
        "won": [printable(query) for query in comparison.won],
        "lost": [printable(query) for query in comparison.lost],
    }


def _distribution(
    values: Sequence[Sequence[Any]], place_of: Callable[[Any], int], labels: Sequence[str]
) -> list[tuple[str, list[int]]]:
    """How many values of each model lie at each label; labels without any are left out."""
    counts = [Counter(map(place_of, model_values)) for model_values in values]
    rows = [(label, [count[place] for count in counts]) for place, label in enumerate(labels)]
    return [(label, row) for label, row in rows if any(row)]


def _place_of_rate(value: float | None) -> int:
    if value is None:
        return _RATES.index("not judged")
    return 0 if value == 0 else 5 if value == 1 else min(4, max(1, math.ceil(4 * value)))


def _lengths(values: Sequence[Sequence[int | None]]) -> list[tuple[str, list[int]]]:
    """Of the responses of each model, by doubling numbers of tokens."""
    known = [[value for value in model_values if value is not None] for model_values in values]
    most = max((value for model_values in known for value in model_values), default=0).bit_length()
    labels = ["0", *(f"{2**power // 2:,}–{2**power - 1:,}" if power > 1 else "1" for power in range(1, most + 1))]
    return _distribution(known, int.bit_length, labels)


def _beginnings(questions: Sequence[Questions]) -> dict[str, str]:
    """By query the first words of its prompt that are not those of every prompt, as a system message is."""
    prompts: dict[str, str] = {}
    for query, row in (pair for rows in questions for pair in rows.items()):
        prompts.setdefault(query, row[0]["prompt"])
    common = commonprefix([*prompts.values()]) if len(prompts) > 1 else ""  # noqa: RUF071 (texts, not paths)
    start = len(common) if common[-1:].isspace() else len(common) - len((common.split() or [""])[-1])
    return {query: printable(prompt[start:].lstrip()[:_PROMPT]) for query, prompt in prompts.items()}


def _result(responses: Sequence[Response]) -> list[float | None] | None:
    """What a model's responses to a question came to: how many, judged, passed, mean reward, mean tokens, cut off."""
    if not responses:
        return None
    verdicts = [response["passed"] for response in responses if response["passed"] is not None]
    rewards = [response["reward"] for response in responses if response["reward"] is not None]
    tokens = [response["tokens"] for response in responses if response["tokens"] is not None]
    cut = sum(response["finish_reason"] == "length" for response in responses)
    means = [rounded(fmean(values)) if values else None for values in (rewards, tokens)]
    return [len(responses), len(verdicts), sum(verdicts), *means, cut]
