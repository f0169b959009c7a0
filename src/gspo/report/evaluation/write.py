"""Writing the page of one evaluation, or of several side by side."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from gspo.evaluation.compare import Evaluation
from gspo.report.evaluation.data import evaluation_data, read_evaluation
from gspo.report.evaluation.responses import MAX_SIZE, carried_responses
from gspo.report.page.write import asset, check_replaceable, filled, replace_page, script_json
from gspo.report.samples import by_query


def write_evaluation_page(directories: Sequence[Path], out: Path) -> Path:
    """Write the page of the evaluations in these directories, the first of which the others are compared with.

    UserError where a directory has no evaluation, or another file is in the page's place.
    """
    check_replaceable(out)
    evaluations = [read_evaluation(directory) for directory in directories]
    names = [evaluation["model"]["name"] for evaluation in evaluations]
    pairs = zip(names, directories, strict=True)
    labels = [name if names.count(name) == 1 else f"{name} ({directory})" for name, directory in pairs]
    replace_page(out, evaluation_document(evaluations, labels))
    return out


def evaluation_document(evaluations: Sequence[Evaluation], labels: Sequence[str]) -> str:
    """The whole page."""
    data = evaluation_data(evaluations, labels)
    chunks = []
    for suite in data["suites"]:
        trees = [evaluation["suites"].get(suite["name"]) for evaluation in evaluations]
        questions = [by_query(tree["responses"] if tree else ()) for tree in trees]
        changed = {
            query for own in suite["differences"] if own for query in (*own.get("won", ()), *own.get("lost", ()))
        }
        carried = carried_responses(questions, changed, MAX_SIZE // len(data["suites"]))
        suite["questions"] = [[*suite["questions"][query], place] for query, place in carried.places.items()]
        suite["coverage"] = carried.coverage
        chunks.append(carried.chunks)
    title = labels[0] if len(labels) == 1 else f"{len(labels)} models"
    parts = {
        "title": escape(f"evaluation of {title}"),
        "style": asset("style.css") + asset("samples.css") + asset("evaluation.css"),
        "script": "\n".join(map(asset, ("store.js", "theme.js", "evaluation.js"))),
        "data": script_json(data),
        "responses": script_json(chunks),
    }
    return filled("evaluation.html", parts)
