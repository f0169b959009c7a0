"""From YAML text and dotted overrides to a Recipe, with errors a person can act on."""

import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from gspo.config import Recipe
from gspo.errors import UserError


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-4 as a number (YAML 1.2) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # what << brings in may be overridden
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key) if isinstance(key, str | int) else None
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `key.subkey=value` overrides (values are YAML; a leading + is accepted).

    Raises UserError where the file, a key or a value cannot be used.
    """
    path = Path(path)
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise UserError("no such recipe file", where=str(path), mend=f"there are: {', '.join(near)}" if near else None)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: {error}", where=str(path), mend="save the file as UTF-8") from None
    tree = _parse_yaml(text, where=str(path))
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
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _parse_yaml(text: str, *, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"not valid YAML: {place}{error.problem}", where=where) from None
    except yaml.YAMLError as error:
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}", where=where) from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.lstrip("+").partition("=")
    if not separator or not key:
        raise UserError(f"override {override!r} is not of the form key.subkey=value", where="command line")
    *parents, last = key.split(".")
    reward = tree.get("reward")
    if [*parents, last][:2] == ["reward", "0"] and isinstance(reward, str | dict):  # one stands for a list of one
        tree["reward"] = [{"function": reward} if isinstance(reward, str) else reward]
    node: Any = tree
    for position, name in enumerate(parents):
        node = _descend(node, name, where=".".join(parents[: position + 1]))
    value = _parse_yaml(text, where=f"override {override!r}")
    if isinstance(node, list):
        node[_index(node, last, where=key)] = value
    else:
        node[last] = value


def _descend(node: Any, name: str, *, where: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, name, where=where)]
    if not isinstance(node.get(name), dict | list):
        node[name] = {}
    return node[name]


def _index(node: list[Any], name: str, *, where: str) -> int:
    if not name.isdigit() or int(name) >= len(node):
        raise UserError(
            f"{where}: a list of {len(node)} takes an index from 0 to {len(node) - 1}", where="command line"
        )
    return int(name)


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
    wanted = next((words for start, words in _WANTED.items() if item["type"].startswith(start)), None)
    if item["type"].startswith("model_") and (section := _section_at(location)):
        wanted = f"a section with keys such as {', '.join(list(section.model_fields)[:3])}"
    return f"{where}: should be {wanted or item['msg'].removeprefix('Input should be ')}, not {item['input']!r}"


_WANTED = {  # the beginnings of pydantic's error types, in a person's words
    "int_": "an integer",
    "float_": "a number",
    "bool_": "true or false",
    "string_type": "text",
    "string_pattern": "made of letters, digits and . _ - only",
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
