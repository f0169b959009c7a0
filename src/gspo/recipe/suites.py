"""The suites that gspo brings, those of a user's own files, and how a recipe names either."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo.errors import UserError, did_you_mean, files_beside
from gspo.recipe.faults import described
from gspo.recipe.files import located
from gspo.recipe.sections import SuiteConfig
from gspo.recipe.yaml_text import read_yaml

_FOLDER = Path(__file__).parents[1] / "suites"


def named_suites() -> list[str]:
    """The names of the suites that gspo brings."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def suite_tree(value: Any) -> Any:
    """The keys of a suite given by its name, by its file, or by a mapping `{suite: NAME, key: value, …}` on top of it.

    A path in the file is looked up beside it, then in the working directory. UserError where there is no such suite or
    file, or it holds no mapping.
    """
    if isinstance(value, str):
        return _read(value)
    if isinstance(value, Mapping) and isinstance(value.get("suite"), str):
        return _merged(_read(value["suite"]), {name: entry for name, entry in value.items() if name != "suite"})
    return value


def _merged(tree: Any, changes: Any) -> Any:
    """The tree with the changes in it, section by section."""
    if not isinstance(tree, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**tree, **{name: _merged(tree.get(name), change) for name, change in changes.items()}}


def _read(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"
    where = name if path.parent != _FOLDER else f"suite {name}"
    if path.parent == _FOLDER and name not in named_suites():
        known = named_suites()
        fix = did_you_mean(name, known, f"there are: {', '.join(known)}.") + " A suite of your own is a file: FILE.yaml"
        raise UserError(f"there is no suite {name!r}", where="suite", fix=fix)
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"), where=where)
    except FileNotFoundError:
        raise UserError("no such suite file", where=where, fix=files_beside(path, ".yaml")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot be read: {reason}", where=where, fix="name a file of UTF-8 text") from None
    if not isinstance(tree, dict):
        fix = "write its keys, such as queries: and reward:; docs/guides/evaluation.md lists them"
        raise UserError("a suite is a mapping", where=where, fix=fix)
    if path.parent != _FOLDER:
        tree = located(tree, (str(path.parent), ""))
    tree = {"name": path.stem, **tree}
    try:
        SuiteConfig.model_validate(tree)
    except ValidationError as error:
        raise described(error, where=where, inside=("evaluation", "suites", 0)) from None
    return tree
