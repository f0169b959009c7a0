"""From YAML text and dotted overrides to a Recipe and back, with errors a person can act on."""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import Repr
from typing import Any

import yaml
from pydantic import ValidationError

from gspo.errors import UserError, files_beside
from gspo.recipe.published import ALIASES
from gspo.recipe.schema import Recipe, recipe_keys
from gspo.recipe.sections import listed_rewards

# Keys, and values of keys, that had another name in an earlier version, or have one elsewhere.
RENAMED = {
    "rollout.turn_separator": "rollout.segment_separator",
    "reward.per: turn": "per: segment",
    **{f"actor.surrogate: {name}": f"actor.surrogate: {surrogate}" for name, surrogate in ALIASES.items()},
}
# Of a file with its aliases written out; a text counts one more for each 100 of its characters.
MAX_VALUES = 10_000
MAX_DEPTH = 50
# Of pydantic's messages, in a person's words.
_PLAIN = {"a valid string": "text", "a valid tuple": "a list", "a valid integer": "an integer"}
_SHORT = Repr()  # of a value in a message
_SHORT.maxstring = _SHORT.maxother = 100
_TAG = "tag:yaml.org,2002:"
# No dates or bytes: no key of a recipe takes one.
_TAGS = {f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_NUMBER = (f"{_TAG}float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `key.subkey=value` overrides (values are YAML; a leading + is accepted).

    Raises UserError where the file, a key or a value cannot be used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such recipe file", where=str(path), fix=files_beside(Path(path), ".yaml")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = "name a file of UTF-8 text that you may read"
        raise UserError(f"cannot be read: {reason}", where=str(path), fix=fix) from None
    tree = read_yaml(text, where=str(path))
    if not isinstance(tree, dict):
        raise UserError("a recipe is a mapping of sections, such as 'model:' and 'queries:'", where=str(path))
    for override in overrides:
        tree = _overridden(tree, override)
    return make_recipe(tree, where=str(path))


def make_recipe(tree: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Validate a nested mapping as a Recipe; UserError lists every fault at once."""
    try:
        return Recipe.model_validate(dict(tree))
    except ValidationError as error:
        faults = [_describe(item) for item in error.errors()]
        raise UserError("\n  ".join(["cannot be used:", *faults] if len(faults) > 1 else faults), where=where) from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; it reads back equal."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML document; UserError, with the line, where it is none, too large or too deep."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _check_nodes(node)
        return None if node is None else loader.construct_document(node)
    except Exception as error:  # a YAMLError; of the scanner and composer a ValueError, a RecursionError and others
        mark = getattr(error, "problem_mark", None) or (loader.get_mark() if loader else None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "problem", error)
        raise UserError(f"not valid YAML: {place}{' '.join(str(problem).split())}", where=where) from None


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-4 as a number (YAML 1.2) and a date as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's name and kind for it
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError) as error:  # of int('0x_') and the like
            raise _no_yaml(node, f"not a value of the kind {node.tag.removeprefix(_TAG)}: {error}") from None


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would read as a number."""


_Loader.add_implicit_resolver(*_NUMBER)
_Dumper.add_implicit_resolver(*_NUMBER)


def _check_nodes(root: yaml.Node | None) -> None:
    """Refuse a key given twice, a value of no kind, and what is too large or too deep, its aliases written out.

    The walk ends at the limit, since a file of 1 KB can stand for 10^9 values.
    """
    num_values, pending = 0, [(root, 1)] if root else []
    while pending:
        node, depth = pending.pop()
        if node.tag not in _TAGS:
            raise _no_yaml(node, f"no key takes a value of the kind {node.tag.removeprefix(_TAG)}")
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
            names: set[tuple[str, str]] = set()
            for key in (key for key in children[::2] if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in names:
                    raise _no_yaml(key, f"key {key.value!r} is given twice")
                names.add((key.tag, key.value))
        num_values += 1 + (len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 0)
        if num_values + len(pending) + len(children) > MAX_VALUES:
            raise _no_yaml(node, f"more than {MAX_VALUES:,} values, with aliases written out")
        if depth > MAX_DEPTH:
            raise _no_yaml(node, f"nested more than {MAX_DEPTH} levels deep")
        pending += [(child, depth + 1) for child in children]


def _no_yaml(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _overridden(tree: dict[str, Any], override: str) -> dict[str, Any]:
    key, separator, text = override.lstrip("+").partition("=")
    if not separator or not key or key.startswith("-"):
        fix = f"write {override.lstrip('-')}" if separator else None
        raise UserError(f"{override!r} is not of the form key.subkey=value", where="command line", fix=fix)
    if re.match(r"reward\.[0-9]", key):
        tree = {**tree, "reward": listed_rewards(tree.get("reward"))}
    value = read_yaml(text, where=f"override {override!r}")
    return dict(_with_value(tree, key.split("."), value, key=key))


def _with_value(node: Any, path: Sequence[str], value: Any, *, key: str) -> Any:
    """A copy of the node with the value at the path; no other place that YAML has an alias of it changes."""
    if not path:
        return value
    name, *rest = path
    if not isinstance(node, list):
        node = node if isinstance(node, dict) else {}
        return {**node, name: _with_value(node.get(name), rest, value, key=key)}
    if name not in map(str, range(len(node))):
        raise UserError(f"{key}: a list of {len(node)} takes an index from 0 to {len(node) - 1}", where="command line")
    return [_with_value(child, rest, value, key=key) if name == str(i) else child for i, child in enumerate(node)]


def _describe(item: Any) -> str:
    """One line for one of pydantic's errors: where it is, what is wrong, and the nearest key or value."""
    location, kind, value = [part for part in item["loc"] if part != "tuple"], item["type"], item["input"]
    where, message = ".".join(map(str, location)), item["msg"].removeprefix("Input ")
    key = ".".join(part for part in location if isinstance(part, str))
    if new_name := RENAMED.get(key) or (isinstance(value, str) and RENAMED.get(f"{key}: {value}")):
        return f"{where}{'' if key in RENAMED else f': {value}'} is called {new_name}"
    if kind == "refusal":
        return f"{where}: {message}" if where else message  # a rule names its keys itself
    if kind == "missing":
        return f"{where}: this key is needed and missing"
    if kind == "extra_forbidden":
        parent, dot, last = where.rpartition(".")
        keys = _keys_in(key.rpartition(".")[0])
        near = difflib.get_close_matches(last, keys, n=1, cutoff=0.5)
        hint = f"did you mean {parent}{dot}{near[0]}?" if near else f"known: {', '.join(keys)}"
        return f"unknown key {where}: {hint}"
    if kind.startswith("model_"):
        return f"{where}: should be a section with keys such as {', '.join(_keys_in(key)[:3])}, not {_shown(value)}"
    for pydantic_words, words in _PLAIN.items():
        message = message.replace(pydantic_words, words)
    shown, field = _shown(value), dict(recipe_keys()).get(key)
    near = difflib.get_close_matches(shown, re.findall(r"'(\w+)'", message), n=1, cutoff=0.5)
    meaning = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", field.description) if field and field.description else ""  # no links
    return f"{where}: {message}, not {shown}: " + (
        f"did you mean {near[0]}?" if near else meaning or "see docs/guide.md"
    )


def _keys_in(section: str) -> list[str]:
    names = (name.rpartition(".") for name, _ in recipe_keys())
    return [last for parent, _, last in names if parent == section]


def _shown(value: Any) -> str:
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"
