"""YAML text to plain values, with the line of every fault; needs no more than PyYAML, so the report reads it too."""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from gspo.errors import UserError

# Of a file with its aliases written out; a text counts one more for each 100 of its characters.
MAX_VALUES = 10_000
MAX_DEPTH = 50
_TAG = "tag:yaml.org,2002:"
# No dates or bytes: no key of a recipe takes one.
_TAGS = {f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_NUMBER = (f"{_TAG}float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


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


def leaves(tree: Any, prefix: str = "") -> dict[str, str]:
    """Dotted keys with their values as text."""
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    dotted: dict[str, str] = {}
    for key, value in pairs:
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping | list) and value
        dotted |= leaves(value, f"{name}.") if nested else {name: json.dumps(value, default=str)}
    return dotted


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


class Dumper(yaml.SafeDumper):
    """Quotes text that the loader would read as a number."""


_Loader.add_implicit_resolver(*_NUMBER)
Dumper.add_implicit_resolver(*_NUMBER)


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
