"""The page of an evaluation, or of several models side by side: numbers, differences, questions and responses."""

import json
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.evaluation.compare import Evaluation, compare
from gspo.evaluation.journal import EVALUATION_FILE, FORMAT
from gspo.recipe.yaml_text import leaves
from gspo.report.page.data import rounded
from gspo.report.page.write import MAX_BYTES, filled, replace_page, script_json
from gspo.report.samples import Contents, Groups, by_query, fitting, index_of, shown_group, step_of

_passes = itemgetter("passed")  # what a response got
_NO_RESPONSES: dict[str, Any] = {"responses": []}


def write_evaluation_page(directories: Sequence[Path], out: Path) -> Path:
    """Write the page of the evaluations in these directories, the first of which the others are compared with.

    UserError where a directory has no evaluation, or another file is in the page's place.
    """
    evaluations = [read_evaluation(directory) for directory in directories]
    names = [evaluation["model"]["name"] for evaluation in evaluations]
    pairs = zip(names, directories, strict=True)
    labels = [name if names.count(name) == 1 else f"{name} ({directory})" for name, directory in pairs]
    replace_page(out, lambda: _document(evaluations, labels))
    return out


def read_evaluation(directory: Path) -> Evaluation:
    """The evaluation that `gspo eval` has written into a directory; UserError where there is none."""
    file = directory / EVALUATION_FILE
    try:
        tree: Evaluation = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        fix = "name the directory that gspo eval has written"
        raise UserError(f"this evaluation cannot be read: {error}", where=str(file), fix=fix) from None
    if tree["format"] != FORMAT:
        fix = "read it with the gspo that has written it, or evaluate again"
        raise UserError(f"its format is {tree['format']}, not {FORMAT}", where=str(file), fix=fix)
    return tree


def _document(evaluations: Sequence[Evaluation], labels: Sequence[str]) -> str:
    names = [*dict.fromkeys(name for evaluation in evaluations for name in evaluation["suites"])]
    suites, sets = [_suite(name, evaluations) for name in names], []
    for suite in suites:
        for place, evaluation in enumerate(evaluations):
            groups = by_query(evaluation["suites"].get(suite["name"], _NO_RESPONSES)["responses"])
            own, coverage = _contents(groups, MAX_BYTES // len(names) // len(evaluations))
            about = {"name": labels[place], "kind": suite["name"], "coverage": coverage}
            index = index_of({0: step_of(groups, _passes, 0)}, own)
            sets.append(({**about, **index, "difference": suite["differences"][place]}, own))
    abouts = [leaves({name: entry for name, entry in own.items() if name != "suites"}) for own in evaluations]
    data = {
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "models": [{"label": label, "about": about} for label, about in zip(labels, abouts, strict=True)],
        "suites": suites,
    }
    title = f"evaluation of {labels[0] if len(labels) == 1 else f'{len(labels)} models'}"
    return filled("evaluation", title, script_json(data), sets)


def _contents(groups: Groups, max_bytes: int) -> tuple[Contents, str]:
    """The responses that a page has: the first ones to each question, as many as fit; and a sentence on that."""
    number = max(map(len, groups.values()), default=0)
    all_groups = first = [shown_group(group, _passes) for group in groups.values()]
    while number > 1 and len(json.dumps(first)) > max_bytes:
        number //= 2
        first = [{**group, "samples": group["samples"][:number]} for group in all_groups]
    own = fitting(((0, group) for group in first), max_bytes)
    if own.get(0, []) == all_groups:
        return own, "All responses."
    page = f"This page has the first {number:,} response(s) to each of {len(own.get(0, ())):,} questions"
    return own, f"{page}; evaluation.json has all."


def _suite(name: str, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """A suite; null stands for a model that was not evaluated on it."""
    suites = [evaluation["suites"].get(name) for evaluation in evaluations]
    return {
        "name": name,
        "numbers": [suite and suite["numbers"] for suite in suites],
        "settings": [suite and leaves({"data": suite["data"], **suite["settings"]}) for suite in suites],
        "differences": [None, *(_difference(evaluations[0], other, name) for other in evaluations[1:])],
    }


def _difference(first: Evaluation, second: Evaluation, suite: str) -> dict[str, Any] | None:
    """The difference of the pass rates, second − first; `why` there is none."""
    if not all(suite in evaluation["suites"] for evaluation in (first, second)):
        return None
    try:
        comparison = compare(first, second, suite)
    except UserError as error:
        return {"why": error.what}
    return {name: value if name in ("won", "lost") else rounded(value) for name, value in comparison.items()}
