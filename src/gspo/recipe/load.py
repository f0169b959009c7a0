"""From YAML text and dotted overrides to a Recipe, with errors a person can act on."""

import difflib
import typing
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from reprlib import Repr
from typing import Any

from pydantic import BaseModel, ValidationError

from gspo.errors import UserError
from gspo.recipe.schema import Recipe, listed_rewards
from gspo.recipe.yaml_text import read_yaml, write_yaml

_SHOWN = Repr()  # of a value in a message
_SHOWN.maxstring = _SHOWN.maxother = 100


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `key.subkey=value` overrides (values are YAML; a leading + is accepted).

    Raises UserError where the file, a key or a value cannot be used.
    """
    path = Path(path)
    tree = read_yaml(_read_text(path), where=str(path))
    if not isinstance(tree, dict):
        raise UserError("a recipe is a mapping of sections, such as 'model:' and 'queries:'", where=str(path))
    for override in overrides:
        _apply_override(tree, override)
    return make_recipe(tree, where=str(path))


def make_recipe(tree: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Validate a nested mapping as a Recipe; UserError lists every fault at once."""
    try:
        return Recipe.model_validate(dict(tree))
    except ValidationError as error:
        faults = [_describe(item) for item in error.errors()]
        raise UserError("\n  ".join(["cannot be used:", *faults] if len(faults) > 1 else faults), where=where) from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out."""
    return write_yaml(recipe.model_dump(mode="json"))


def _read_text(path: Path) -> str:
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: {error}", where=str(path), fix="save the file as UTF-8") from None
    except OSError as error:
        fix = "name a file that you may read"
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    raise UserError("no such recipe file", where=str(path), fix=f"there are: {', '.join(near)}" if near else None)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.lstrip("+").partition("=")
    if not separator or not key:
        raise UserError(f"override {override!r} is not of the form key.subkey=value", where="command line")
    *parents, last = key.split(".")
    if parents[:1] == ["reward"] and (isinstance(tree.get("reward"), list) or _is_index([*parents, last][1])):
        tree["reward"] = listed_rewards(tree.get("reward"))
    node: Any = tree
    for position, name in enumerate(parents):
        node = _descend(node, name, where=".".join(parents[: position + 1]))
    value = read_yaml(text, where=f"override {override!r}")
    node[_place(node, last, where=key)] = value


def _descend(node: Any, name: str, *, where: str) -> Any:
    """The list or mapping in a place of one, a copy of its own: an alias of it, elsewhere, is not to change with it."""
    place = _place(node, name, where=where)
    below = node[place] if isinstance(node, list) else node.get(place)
    node[place] = copy(below) if isinstance(below, dict | list) else {}
    return node[place]


def _place(node: Any, name: str, *, where: str) -> Any:
    """The index of a list, or the key of a mapping, that a part of an override means."""
    if not isinstance(node, list):
        return name
    if not _is_index(name) or int(name) >= len(node):
        raise UserError(
            f"{where}: a list of {len(node)} takes an index from 0 to {len(node) - 1}", where="command line"
        )
    return int(name)


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def _describe(item: Any) -> str:
    """One line for one of pydantic's errors: where, what, and the nearest known key."""
    location = [part for part in item["loc"] if part != "tuple"]
    where = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = (
            f"did you mean {'.'.join(map(str, [*location[:-1], near[0]]))}?" if near else f"known: {', '.join(known)}"
        )
        return f"unknown key {where}: {hint}"
    if item["type"] == "missing":
        return f"{where}: this key is needed and missing"
    if item["type"] == "value_error":
        return str(item["msg"].removeprefix("Value error, "))
    if item["type"] == "fault":
        return f"{where}: {item['msg']}"
    wanted = next((words for start, words in _WANTED.items() if item["type"].startswith(start)), None)
    if item["type"].startswith("model_") and (section := _section_at(location)):
        wanted = f"a section with keys such as {', '.join(list(section.model_fields)[:3])}"
    return f"{where}: should be {wanted or item['msg'].removeprefix('Input should be ')}, not {_shown(item['input'])}"


def _shown(value: Any) -> str:
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"


_WANTED = {  # the beginnings of pydantic's error types, in a person's words
    "int_": "an integer",
    "float_": "a number",
    "bool_": "true or false",
    "string_type": "text",
    "string_pattern": "made of at most 255 letters, digits and . _ - only",
    "dict_": "a mapping",
    "tuple_": "a list",
    "too_long": "empty: nothing can be listed here yet",
}


def _known_keys(location: Sequence[str | int]) -> list[str]:
    return list(_section_at(location).model_fields)


def _section_at(location: Sequence[str | int]) -> Any:
    section: Any = Recipe
    for part in location:
        if not isinstance(part, int):
            section = _section_of(section.model_fields[part].annotation)
    return section


def _section_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner_sections = (_section_of(inner) for inner in typing.get_args(annotation))
    return next((found for found in inner_sections if found is not None), None)
