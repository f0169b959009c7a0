"""What `gspo eval` has written, read back; a response that cannot be read is skipped and counted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.report.shapes import is_sample, section
from gspo.run.journal import EVALUATION_FILE, FORMAT
from gspo.run.plain_files import parsed, read_plain

Evaluation = Mapping[str, Any]

_RESPONSE: Mapping[str, Any] = {  # what a response has where the file does not say
    **dict.fromkeys(("sample", "reward", "failure", "tokens", "passed")),
    **{"prompt": "", "completion": "", "columns": {}, "rewards": {}, "extra": {}, "finish_reason": "unknown"},
}


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation in a directory, with every key that its format has; UserError where there is none."""
    file, fix = path / EVALUATION_FILE, "name the directory that gspo eval has written"
    try:
        tree = parsed(read_plain(file))
    except FileNotFoundError:
        what = f"it has no {EVALUATION_FILE}" if path.is_dir() else "no such directory"
        raise UserError(f"there is no evaluation: {what}", where=str(path), fix=fix) from None
    except OSError as error:
        raise UserError(f"this evaluation cannot be read: {error.strerror}", where=str(file), fix=fix) from None
    if tree is None or (number := tree.get("format")) != FORMAT:
        what = "no JSON" if tree is None else f"no evaluation of format {FORMAT}, but of {number!r}"
        fix = "read it with the gspo that has written it, or evaluate again"
        raise UserError(f"this is {what}", where=str(file), fix=fix)
    model, suites = section(tree, "model"), section(tree, "suites")
    return {
        **{"gspo": tree.get("gspo"), "seed": tree.get("seed"), "engine": section(tree, "engine")},
        "model": {**model, "name": str(model.get("name") or path.name)},
        "suites": {name: _suite(suite) for name, suite in suites.items() if isinstance(suite, Mapping)},
    }


def _suite(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    lines = tree.get("responses") or []
    known = [{name: value for name, value in line.items() if value is not None} for line in lines]
    responses = [{**_RESPONSE, **line} for line in known if is_sample(line)]
    about = {name: section(tree, name) for name in ("settings", "data", "numbers")}
    return {**about, "responses": responses, "num_not_read": len(lines) - len(responses)}
