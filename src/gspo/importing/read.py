"""Files of other libraries to dotted keys: interpolations resolved, overrides applied, the library recognised."""

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from gspo.errors import UserError, files_beside
from gspo.importing.draft import Computed
from gspo.importing.scripts import python_arguments, shell_words
from gspo.recipe.yaml_text import read_yaml

KINDS = {"areal": "AReaL", "verl": "verl", "trl": "TRL"}
_TRL = "num_generations per_device_train_batch_size max_completion_length loss_type learning_rate scale_rewards"
_WANTED = "name an AReaL YAML, a verl script or YAML, or TRL's GRPOConfig as YAML, JSON or Python"
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def read_theirs(path: Path, overrides: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return the library, a key of KINDS, and the dotted keys of a file with the overrides; UserError for others."""
    text = _text(path)
    pairs = [_pair(override) for override in overrides]
    if path.suffix == ".py":
        return "trl", _named_anew("trl", {**python_arguments(text, where=str(path)), **dict(pairs)})
    is_yaml, tree = path.suffix in (".yaml", ".yml", ".json", ""), dict[str, Any]()
    words = None if is_yaml else shell_words(text)
    try:
        tree = read_yaml(text, where=str(path)) if is_yaml else tree
    except UserError as error:
        raise UserError(error.what, where=error.where, fix="correct it there, or name another file") from None
    pairs = [*(_pair(word) for word in words or ()), *pairs]
    kind = "verl" if words is not None else kind_of(tree)
    if kind is None:
        what = "this is a recipe already" if _is_ours(tree) else "no configuration of AReaL, verl or TRL"
        raise UserError(what, where=str(path), fix=f"gspo train {path}" if _is_ours(tree) else _WANTED)
    for key, value in pairs:
        _set(tree, key.split(".") if kind != "trl" else [key], value)
    return kind, _named_anew(kind, _flat(_resolved(tree, (tree, table_of(kind)["defaults"]), (), str(path))))


def _named_anew(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keys by the names that the library has for them today."""
    names = table_of(kind).get("renamed", {})
    return {names.get(key, key): value for key, value in given.items()}


def table_of(kind: str) -> Any:
    """Read the table of a library, which has what is said of its keys."""
    return read_yaml(files("gspo.importing").joinpath(f"{kind}.yaml").read_text(encoding="utf-8"), where=kind)


def kind_of(tree: Any) -> str | None:
    """Return the library whose configuration the tree is; None for a recipe, and for anything else."""
    if not isinstance(tree, dict):
        return None
    if "actor_rollout_ref" in tree:
        return "verl"
    actor = tree.get("actor")
    if isinstance(actor, dict) and {"gconfig", "rollout"} & {*tree} and {"train_dataset", "gconfig"} & {*tree}:
        return "areal"
    return "trl" if not _is_ours(tree) and not set(_TRL.split()).isdisjoint(tree) else None


def fault(path: str | Path, overrides: Sequence[str]) -> UserError | None:
    """The error of a command that wants a recipe, where the file is another library's: how to import it."""
    try:
        kind, _ = read_theirs(Path(path))
    except (UserError, ValueError):
        return None
    words = shlex.join(["gspo", "import", str(path), *overrides, "-o", "recipe.yaml"])
    return UserError(f"this is a file of {KINDS[kind]}, not a recipe", where=str(path), fix=words)


def _is_ours(tree: Any) -> bool:
    return isinstance(tree, dict) and "model" in tree and not {"queries", "rollout", "steps"}.isdisjoint(tree)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix=files_beside(path, ".yaml", ".sh", ".py")) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path), fix=_WANTED) from None


def _pair(word: str) -> tuple[str, Any]:
    """A dotted key and its value; Hydra's + and ++, which add a key, mean the same here."""
    key, equals, text = word.partition("=")
    if not equals or not key.strip("+"):
        what, fix = f"{word!r} is not of the form key=value", "such as +actor.eps_clip=0.2"
        raise UserError(what, where="command line", fix=fix)
    value = Computed(text) if isinstance(word, Computed) else read_yaml(text, where=f"override {word!r}")
    return key.lstrip("+"), value


def _set(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, last = path
    for name in sections:
        inner = tree.get(name)
        tree[name] = inner if isinstance(inner, dict) else {}
        tree = tree[name]
    tree[last] = value


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping) or (prefix and not tree):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}.{name}".lstrip("."))
    return found


def _resolved(node: Any, root: Any, stack: tuple[str, ...], where: str) -> Any:
    """The node with each `${a.b}` replaced by what stands at that key."""
    if isinstance(node, dict):
        return {name: _resolved(value, root, stack, where) for name, value in node.items()}
    if isinstance(node, list):
        return [_resolved(value, root, stack, where) for value in node]
    if not isinstance(node, str) or isinstance(node, Computed) or "${" not in node:
        return node
    names = _REFERENCE.findall(node)
    if not names or any(":" in name or name.startswith(".") for name in names):  # a resolver such as ${oc.env:X}
        return Computed(node)
    values = [_at(name.strip(), root, stack, where) for name in names]
    if _REFERENCE.fullmatch(node):
        return values[0]
    return _REFERENCE.sub(lambda _: str(values.pop(0)), node)


def _at(name: str, root: Any, stack: tuple[str, ...], where: str) -> Any:
    if name in stack:
        circle = " → ".join([*stack[stack.index(name) :], name])
        raise UserError(f"a circular interpolation: {circle}", where=where, fix=f"give {name} a value of its own")
    node, defaults = root
    for part in name.split("."):
        if name in defaults and not (isinstance(node, Mapping) and part in node):
            return defaults[name]
        if not isinstance(node, Mapping) or part not in node:
            fix = f"give it: gspo import … {name}=VALUE"
            raise UserError(f"${{{name}}}: there is no key {name}", where=where, fix=fix)
        node = node[part]
    return _resolved(node, root, (*stack, name), where)
