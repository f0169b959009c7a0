"""From YAML text and dotted overrides to a Recipe and back, with errors a person can act on."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gspo.errors import UserError, files_beside
from gspo.recipe.faults import described, shown
from gspo.recipe.files import folders_of, located
from gspo.recipe.published import as_it_was
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import listed_rewards
from gspo.recipe.suites import suite_tree
from gspo.recipe.yaml_text import Dumper, read_yaml


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, of_run: bool = False) -> Recipe:
    """Read a recipe file and apply `key.subkey=value` overrides; `key+=value` adds to a list. Values are YAML.

    Relative paths are looked up beside the recipe, then in the working directory; those of overrides the other way
    round. `of_run`: a run has written the file, perhaps one of an earlier gspo. Raises UserError where the file, a key
    or a value cannot be used.
    """
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        fix = '["steps=10", "actor.clip_low=1e-3"]'
        raise UserError("overrides are a list of texts", where="load_recipe", fix=fix)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such recipe file", where=str(path), fix=files_beside(Path(path), ".yaml")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        is_run = isinstance(error, IsADirectoryError) and (Path(path) / "recipe.yaml").is_file()
        fix = f"to continue this run: gspo resume {path}" if is_run else "name a file of UTF-8 text that you may read"
        raise UserError(f"cannot be read: {reason}", where=str(path), fix=fix) from None
    tree = read_yaml(text, where=str(path))
    folders, keys = folders_of(Path(path)), []
    tree = located(tree, folders)
    if of_run:
        tree = as_it_was(tree)
    for override in overrides if isinstance(tree, dict) else ():
        tree = overridden(tree, override, folders[::-1])
        keys.append(_split(override)[0].removesuffix("+"))
    return _validated(tree, str(path), keys)


def make_recipe(tree: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Validate a nested mapping as a Recipe; UserError lists every fault at once."""
    return _validated(tree, where)


def as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path, *, where: str) -> Recipe:
    """The recipe itself, that of a mapping, or that of a file."""
    if isinstance(recipe, Recipe):
        return recipe
    return load_recipe(recipe) if isinstance(recipe, str | Path) else make_recipe(recipe, where=where)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; it reads back equal."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _validated(tree: Any, where: str, overridden: Sequence[str] = ()) -> Recipe:
    if not isinstance(tree, Mapping):
        what = f"a recipe is a mapping, {'and this is empty' if tree is None else f'not {shown(tree)}'}"
        fix = "write sections, such as 'model:' and 'queries:'; in Python, load_recipe reads a file"
        raise UserError(what, where=where, fix=fix)
    tree = dict(tree)
    if isinstance(evaluation := tree.get("evaluation"), Mapping) and isinstance(evaluation.get("suites"), list | tuple):
        tree["evaluation"] = {**evaluation, "suites": [suite_tree(suite) for suite in evaluation["suites"]]}
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise described(error, where=where, overridden=overridden) from None


def overridden(tree: dict[str, Any], override: str, folders: Sequence[str] = ("",)) -> dict[str, Any]:
    """The tree with the value of `key.subkey=value` in it; a path is looked up in the folders. UserError for others."""
    key, text = _split(override)
    key, adds = key.removesuffix("+"), key.endswith("+")
    path = [*key.split("."), *["+"] * adds]
    if path[0] == "reward" and path[1:] and re.match("[0-9+]", path[1]):
        tree = {**tree, "reward": listed_rewards(tree.get("reward") or [])}
    if path[0] == "phases" and path[1:]:
        tree = {**tree, "phases": tree.get("phases") or []}
    if path[:2] == ["evaluation", "suites"] and path[2:] and isinstance(evaluation := tree.get("evaluation"), dict):
        suites = [{"suite": suite} if isinstance(suite, str) else suite for suite in evaluation.get("suites") or ()]
        tree = {**tree, "evaluation": {**evaluation, "suites": suites}}
    value = located(read_yaml(text, where=f"override {override!r}"), folders, ".".join(path))
    return dict(_with_value(tree, path, value, key=key))


def _split(override: str) -> tuple[str, str]:
    key, separator, text = override.lstrip("+").partition("=")
    if not separator or not key or key.startswith("-"):
        fix = f"write {key.lstrip('-')}={text or 'VALUE'}" if key.strip("-") else None
        raise UserError(f"{override!r} is not of the form key.subkey=value", where="command line", fix=fix)
    return key, text


def _with_value(node: Any, path: Sequence[str], value: Any, *, key: str) -> Any:
    """A copy of the node with the value at the path; no other place that YAML has an alias of it changes."""
    if not path:
        return value
    name, *rest = path
    if name == "+" and isinstance(node, list | None):
        return [*(node or ()), *(value if isinstance(value, list) else [value])]
    if not isinstance(node, list):
        node = node if isinstance(node, dict) else {}
        return {**node, name: _with_value(node.get(name), rest, value, key=key)}
    places = [str(place) for place in range(len(node) + 1)]
    if name not in places:
        what = f"{key}: a list of {len(node)} takes an index from 0 to {len(node)}, which adds to it"
        raise UserError(what, where="command line")
    children = [*node, None] if name == places[-1] else node
    return [_with_value(child, rest, value, key=key) if name == str(i) else child for i, child in enumerate(children)]
