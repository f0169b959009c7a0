"""What a line of a run's files is: its reader skips any other line, and counts it."""

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from gspo.metrics.numbers import is_number

_LARGEST_WHOLE = 2**53  # that every reader of JSON has exactly
_DEPTH = 50  # of lists and mappings in one another
_NUMBERS_OR_NULL = frozenset((int, float, type(None)))
_TEXTS = ("query", "prompt", "completion", "finish_reason")
_NUMBERS = ("reward", "advantage", "sequence_ratio", "clipped", "mini_batch", "policy_version", "tokens")
_LISTS = ("token_characters", "token_log_ratios", "token_advantages")
_MAPPINGS = ("rewards", "columns", "extra")
_FLAT = frozenset((*_TEXTS, *_NUMBERS, *_LISTS, "rewards", "failure", "passed"))


def is_step(value: Any) -> TypeGuard[int]:
    """Whether it numbers a step."""
    return type(value) is int and 0 <= value <= _LARGEST_WHOLE


def is_sample(line: Mapping[str, Any]) -> bool:
    """Whether it is a line of the rollouts, or of an evaluation's responses."""
    return (
        "query" in line
        and all(isinstance(line.get(name, ""), str) for name in _TEXTS)
        and all(isinstance(line.get(name, {}), dict) for name in _MAPPINGS)
        and all(isinstance(line.get(name), list | None) for name in _LISTS)
        and isinstance(line.get("failure"), str | None)
        and isinstance(line.get("passed"), bool | None)
        and is_step(line.get("tokens", 0))
        and _are_numbers([line.get(name) for name in _NUMBERS])
        and _are_numbers(line.get("rewards", {}).values())
        and all(_are_numbers(line.get(name) or ()) for name in _LISTS)
        and all(_is_plain(value) for name, value in line.items() if name not in _FLAT)
    )


def section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a recipe; empty where that of another version has something else there, or nothing."""
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def _are_numbers(values: Collection[Any]) -> bool:
    """Lists of a number a token are long: the whole is looked at at once."""
    try:
        return set(map(type, values)) <= _NUMBERS_OR_NULL and is_number(sum(map(abs, filter(None, values))))
    except OverflowError:
        return False


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Whether it is something that a page can have, of whatever later versions write."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in items)
    return not isinstance(value, float) or math.isfinite(value)
