"""What a line of a run's files is: its reader skips any other line, and counts it."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from gspo.metrics.numbers import is_number

Shape = Callable[[Any], bool]

_LARGEST_WHOLE = 2**53  # that every reader of JSON has exactly
_DEPTH = 50  # of lists and mappings in one another
_NUMBERS_OR_NULL = frozenset((int, float, type(None)))


def is_step(value: Any) -> TypeGuard[int]:
    """Whether it numbers a step."""
    return type(value) is int and 0 <= value <= _LARGEST_WHOLE


def is_event(line: Mapping[str, Any]) -> bool:
    """Whether it is a line of the history."""
    return _has_shapes({name: value for name, value in line.items() if value is not None}, _EVENT)


def is_sample(line: Mapping[str, Any]) -> bool:
    """Whether it is a line of the rollouts, or of an evaluation's responses."""
    return "query" in line and _has_shapes(line, _SAMPLE)


def section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a recipe; empty where that of another version has something else there, or nothing."""
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def _has_shapes(line: Mapping[str, Any], shapes: Mapping[str, Shape]) -> bool:
    return all(shapes.get(name, _is_plain)(value) for name, value in line.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number_or_null(value: Any) -> bool:
    return value is None or (type(value) in _NUMBERS_OR_NULL and is_number(value))


def _are_numbers(value: Any) -> bool:
    """Lists of a number a token are long: the whole is looked at at once."""
    if value is None or not isinstance(value, list) or not set(map(type, value)) <= _NUMBERS_OR_NULL:
        return value is None
    try:
        return is_number(sum(map(abs, filter(None, value))))
    except OverflowError:
        return False


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and _is_plain(value)


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Whether it is something that a page can have, of whatever later versions write."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in items)
    return not isinstance(value, float) or math.isfinite(value)


_EVENT: Mapping[str, Shape] = {
    **dict.fromkeys(("event", "time", "how", "reason", "host", "working_directory", "introduction"), _is_text),
    **{"step": is_step, "environment": _is_mapping},
}
_SAMPLE: Mapping[str, Shape] = {
    **dict.fromkeys(("query", "prompt", "completion", "finish_reason"), _is_text),
    **dict.fromkeys(("reward", "advantage", "sequence_ratio", "clipped"), _is_number_or_null),
    **dict.fromkeys(("mini_batch", "policy_version"), _is_number_or_null),
    **dict.fromkeys(("token_characters", "token_log_ratios", "token_advantages"), _are_numbers),
    **{"tokens": is_step, "columns": _is_mapping, "extra": _is_mapping},
    "failure": lambda value: value is None or _is_text(value),
    "passed": lambda value: value is None or isinstance(value, bool),
    "rewards": lambda value: isinstance(value, dict) and all(map(_is_number_or_null, value.values())),
}
