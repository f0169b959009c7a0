"""The files that a recipe names: beside the recipe or in the working directory, and there before anything is loaded."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gspo.errors import UserError, listed
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import names_file

_PATHS = re.compile(
    r"(queries(\.sources\.[\w-]+)?|evaluation|cold_start|model)\.path|queries\.sources\.[\w-]+|model\.tokenizer|actor\.kl\.reference|teacher\.path|rollout\.\w+\.python"
    r"|evaluation\.suites\.([0-9]+|\+)(\.suite|\.queries\.path)?"
)
_FUNCTIONS = re.compile(
    r"(evaluation\.suites\.[0-9]+\.)?(reward|hooks)(\.([0-9]+|\+))?(\.function)?|cold_start\.demonstrations|queries\.refresh"
    r"|rollout\.(tools(\.([0-9]+|\+))?|environment|agent)"
)
_MODELS = ("model", "actor", "teacher")  # their keys name directories


def folders_of(path: Path) -> tuple[str, ...]:
    """Return where a recipe's relative paths are looked up, in this order; "" is the working directory.

    The recipe that a run or a checkpoint has written holds paths that are right from the run's working directory.
    """
    beside = (path.parent / "history.jsonl").is_file() or (path.parent / "manifest.json").is_file()
    is_written = path.name == "recipe.yaml" and beside
    return ("",) if is_written or path.parent.samefile(Path.cwd()) else (str(path.parent), "")


def located(tree: Any, folders: Sequence[str], key: str = "") -> Any:
    """A copy of a recipe's tree, or of the value of a key, each file with the first of the folders that has it."""
    if isinstance(tree, dict):
        return {name: located(value, folders, f"{key}.{name}".lstrip(".")) for name, value in tree.items()}
    if isinstance(tree, list):
        return [located(value, folders, f"{key}.{place}") for place, value in enumerate(tree)]
    file, is_there = _file(key, tree), os.path.isdir if key.startswith(_MODELS) else os.path.isfile
    there = (folder for folder in folders if file and is_there(os.path.join(folder, file)))  # noqa: PTH118
    return os.path.join(next(there, ""), tree) if file else tree  # noqa: PTH118 - Path drops the ./ of no hub id


def files_of(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a recipe, or of its tree, that name a file, a directory or a hub id, and which."""
    tree = tree.model_dump(mode="json") if isinstance(tree, Recipe) else tree
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from files_of(value, f"{key}.{name}".lstrip("."))
    if file := _file(key, tree):
        yield key, file


def check_files(recipe: Recipe, path: str | Path) -> None:
    """Raise UserError for a local file or directory that the recipe of that path needs and that is not there."""
    needed = {"evaluation.path": recipe.evaluation.num_queries, "cold_start": recipe.cold_start.steps}
    needed["actor"] = recipe.actor.kl.coefficient > 0
    places = {str(Path(path).resolve().parent): "beside the recipe", str(Path.cwd()): "in the working directory"}
    for key, file in files_of(recipe):
        is_needed = all(needed[section] for section in needed if key.startswith(section))
        is_local = file.endswith(".py") or names_file(file)
        # An interpreter that is missing has a message of its own.
        if not is_needed or not is_local or key.endswith(".python") or os.path.lexists(file):
            continue
        folder, kind = Path(file).parent, Path(file).suffix
        near = sorted({str(folder / path.name) for place in places for path in Path(place, folder).glob(f"*{kind}")})
        fix = f"looked up {' and '.join(f'{words} ({place})' for place, words in places.items())}"
        what = "no such directory" if key.startswith(_MODELS) else "no such file"
        raise UserError(what, where=f"{key}: {file}", fix=f"there are: {listed(near)}; {fix}" if near else fix)


def _file(key: str, value: Any) -> str | None:
    """Return what the value of a key names: a file, a directory or a hub id; None where it names none."""
    if not isinstance(value, str) or value == "fit":
        return None
    function = _FUNCTIONS.fullmatch(key) and re.fullmatch(r"(.+\.py):[^:/]*", value)
    return function[1] if function else value if _PATHS.fullmatch(key) else None
