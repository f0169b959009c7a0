"""A recipe with the origin of each value beside it, and the list of what became of each key."""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gspo.errors import UserError, visible
from gspo.importing import areal, trl, verl
from gspo.importing.draft import CATEGORIES, FILL_IN, WHERE, Draft, Line, Theirs, ruled, same, short, shown, sorted_out
from gspo.importing.read import KINDS, read_theirs, table_of
from gspo.recipe.load import make_recipe
from gspo.recipe.sections import RecipeKeys
from gspo.recipe.yaml_text import Dumper, read_yaml

_TRANSLATE = {"areal": areal.translate, "verl": verl.translate, "trl": trl.translate}


def import_recipe(path: Path, overrides: Sequence[str] = (), folder: Path = Path()) -> tuple[str, list[str]]:
    """The text of a recipe that does what a file of AReaL, verl or TRL does, and the list of what became of its keys.

    The recipe is to lie in the folder. UserError where the file is of none of the three, or cannot be read.
    """
    kind, theirs, draft = _drafted(path, overrides, folder)
    pairs = [override.partition("=") for override in overrides]
    given = [f"{key}={text if shown(key, text) == short(text) else '…'}" for key, _, text in pairs]
    words = shlex.join(["gspo", "import", path.name, *given])
    head = visible(f"# Made of {KINDS[kind]}'s {path.name} by: {words}").replace("\n", " ")
    text = f"{head}\n" + "".join(_sections(_tree(draft.lines), theirs))
    try:
        make_recipe(read_yaml(text, where="the translation"), where=f"{path}, translated")
    except UserError as error:
        fix = f"give it another value: gspo import {path} key=VALUE, with the keys of {KINDS[kind]}"
        raise UserError(f"what it says has no counterpart: {error.what}", where=str(path), fix=fix) from None
    return text, list(_listed(theirs, draft, sorted_out(theirs, draft, table_of(kind))))


def categories_of(path: Path) -> dict[str, tuple[str, str]]:
    """The category of each key of a file, and what is said of it."""
    kind, theirs, draft = _drafted(path, (), Path())
    return sorted_out(theirs, draft, table_of(kind))


def _drafted(path: Path, overrides: Sequence[str], folder: Path) -> tuple[str, Theirs, Draft]:
    kind, given = read_theirs(path, overrides)
    table, beside = table_of(kind), os.path.relpath(path, folder)
    theirs = Theirs(path=path, beside=beside, given=given, defaults=table["defaults"])
    try:
        own = _TRANSLATE[kind](theirs)
        found = (*same(theirs, table["same"]), *own.lines, *ruled(theirs, table["rules"]))
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:  # of a number that is a text, or 0
        fix = f"check its batch sizes, epochs and steps against {KINDS[kind]}'s own documents"
        raise UserError(f"a value is of no kind that {KINDS[kind]} takes: {error}", where=str(path), fix=fix) from None
    lines = {line.key: line for line in found}
    return kind, theirs, Draft(lines=tuple(lines.values()), said=own.said, notes=own.notes)


def _tree(lines: Iterable[Line]) -> dict[str, Any]:
    """The lines by sections, in the order in which a recipe has its keys."""
    order = list(RecipeKeys.model_fields)
    tree: dict[str, Any] = {}
    for line in sorted(lines, key=lambda line: order.index(line.key.partition(".")[0])):
        *sections, last = line.key.split(".")
        node = tree
        for name in sections:
            node = node.setdefault(name, {})
        node[last] = line
    return tree


def _sections(tree: Mapping[str, Any], theirs: Theirs, indent: str = "") -> Iterable[str]:
    for name, node in tree.items():
        if isinstance(node, Line):
            style = '"' if isinstance(node.value, str) and "\n" in node.value else None
            how: dict[str, Any] = {"default_flow_style": True, "default_style": style, "width": 10**6}
            value = yaml.dump(node.value, Dumper=Dumper, allow_unicode=True, **how)
            text, comment = value.removesuffix("...\n").strip(), theirs.origin(node)
            yield f"{indent}{name}: {text}" + (f" # {comment}\n" if comment else "\n")
        else:
            yield f"{indent}{name}:\n"
            yield from _sections(node, theirs, f"{indent}  ")


def _listed(theirs: Theirs, draft: Draft, found: Mapping[str, tuple[str, str]]) -> Iterable[str]:
    """The list that a person reads: what to fill in, what the original cannot do, then each key in its category."""
    yield from (
        f"fill in: {line.key}{line.note.removeprefix(FILL_IN)}" for line in draft.lines if line.note.startswith(FILL_IN)
    )
    yield from (f"note: {note}" for note in draft.notes)
    for category in CATEGORIES:
        keys = {key: words for key, (name, words) in found.items() if name == category}
        if category == WHERE and keys:
            names = ", ".join(dict.fromkeys(key.partition(".")[0] for key in keys))
            yield f"{WHERE}: not translated; see docs/cluster.md: {len(keys)} keys, of {names}"
        elif keys:
            yield f"{category}:"
            yield from (
                f"  {key}: {shown(key, theirs.given[key])}{_then(category, words)}" for key, words in keys.items()
            )
    defaults = [line for line in draft.lines if line.origins and not theirs.given.keys() & {*line.origins}]
    if defaults:
        yield "implied, for these are their defaults:"
        yield from (f"  {theirs.origin(line)} → {line.key}: {short(line.value)}" for line in defaults)


def _then(category: str, words: str) -> str:
    return f" → {words}" if category == "translated" else f": {words}" if words else ": not translated"
