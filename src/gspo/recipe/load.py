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
from gspo.recipe.yaml_text import Dumper, read_yaml

# Keys, and values of keys, that had another name in an earlier version, or have one elsewhere.
RENAMED = {
    "rollout.turn_separator": "rollout.segment_separator",
    "reward.per: turn": "per: segment",
    **{f"actor.surrogate: {name}": f"actor.surrogate: {surrogate}" for name, surrogate in ALIASES.items()},
}
# Of pydantic's messages, in a person's words.
_PLAIN = {
    **{"a valid string": "text", "a valid integer": "an integer", "a valid number": "a number"},
    **{"a valid boolean": "true or false", "a valid tuple": "a list", "a valid dictionary": "a mapping"},
    **dict.fromkeys((", unable to interpret input", ", unable to parse string as an integer"), ""),
    ", unable to parse string as a number": "",
}
_SHORT = Repr()  # of a value in a message
_SHORT.maxstring = _SHORT.maxother = 100


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `key.subkey=value` overrides (values are YAML; a leading + is accepted).

    Raises UserError where the file, a key or a value cannot be used.
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
    for override in overrides if isinstance(tree, dict) else ():
        tree = _overridden(tree, override)
    return make_recipe(tree, where=str(path))


def make_recipe(tree: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Validate a nested mapping as a Recipe; UserError lists every fault at once."""
    if not isinstance(tree, Mapping):
        fix = "write sections, such as 'model:' and 'queries:'; a file is read by load_recipe"
        raise UserError(f"a recipe is a mapping, not {_shown(tree)}", where=where, fix=fix)
    try:
        return Recipe.model_validate(dict(tree))
    except ValidationError as error:
        faults = [_describe(item) for item in error.errors()]
        raise UserError("\n  ".join(["cannot be used:", *faults] if len(faults) > 1 else faults), where=where) from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; it reads back equal."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _overridden(tree: dict[str, Any], override: str) -> dict[str, Any]:
    key, separator, text = override.lstrip("+").partition("=")
    if not separator or not key or key.startswith("-"):
        fix = f"write {key.lstrip('-')}={text or 'VALUE'}" if key.strip("-") else None
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
        f"did you mean {near[0]}?" if near else meaning or "see docs/reference/recipe.md"
    )


def _keys_in(section: str) -> list[str]:
    names = (name.rpartition(".") for name, _ in recipe_keys())
    return [last for parent, _, last in names if parent == section]


def _shown(value: Any) -> str:
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"
