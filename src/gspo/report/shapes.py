"""What a value of a run's files may be: anything else is left out where it is read, and reported."""

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeGuard

from gspo.metrics.numbers import DEPTH, is_number

Shape = Callable[[Any], Any]  # the value itself; without what in it is of another kind; or None

_LARGEST_WHOLE = 2**53  # that every reader of JSON has exactly
_NUMBERS = frozenset((int, float))
_NUMBERS_OR_NULL = _NUMBERS | {NoneType}


def is_step(value: Any) -> TypeGuard[int]:
    """Whether it numbers a step."""
    return _whole(value) is not None


def event(line: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """A line of the history, null for what is not what it should be, and the names of that."""
    return _shaped(line, _EVENT)


def sample(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """A line of the rollouts, without what is not what it should be; `not_read` then names that."""
    kept, odd = _shaped(line, _SAMPLE)
    if not odd and None not in map(line.get, _NEVER_NULL):
        return line
    kept = {name: value for name, value in kept.items() if value is not None or name not in _NEVER_NULL}
    return {**kept, "not_read": ", ".join(odd)} if odd else kept


def section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a recipe; empty where that of another version has something else there, or nothing."""
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def _shaped(line: Mapping[str, Any], shapes: Mapping[str, Shape]) -> tuple[Mapping[str, Any], list[str]]:
    """The line with what is left of each value, and the names of those of which something is missing."""
    kept = {name: shapes.get(name, _plain)(value) for name, value in line.items() if value is not None}
    odd = [name for name, value in kept.items() if value is not line[name]]
    return ({**line, **kept} if odd else line), odd


def _number(value: Any) -> float | None:
    return value if type(value) in _NUMBERS and is_number(value) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _LARGEST_WHOLE else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _list_of_numbers(value: Any) -> list[float | None] | None:
    if not (isinstance(value, list) and set(map(type, value)) <= _NUMBERS_OR_NULL):
        return None
    try:  # lists of a number a token are long: the whole at once
        is_plain = is_number(sum(map(abs, filter(None, value))))
    except OverflowError:
        is_plain = False
    return value if is_plain else [item if is_number(item) else None for item in value]


def _mapping_of(shape: Shape) -> Shape:
    def mapping(value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        kept = {name: item for name, item in value.items() if item is None or shape(item) is item}
        return value if len(kept) == len(value) else kept

    return mapping


def _plain(value: Any, depth: int = DEPTH) -> Any:
    """Of whatever later versions write."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if items is None:
        return value if isinstance(value, str | bool) or is_number(value) else None
    return value if depth and all(item is None or _plain(item, depth - 1) is item for item in items) else None


_EVENT: Mapping[str, Shape] = {
    **dict.fromkeys(("event", "time", "how", "reason", "host", "working_directory"), _text),
    **dict.fromkeys(("process", "cold_start_step", "step"), _whole),
    **{"introduction": _text, "seconds": _number, "environment": _mapping_of(_plain)},
}
_SAMPLE: Mapping[str, Shape] = {
    **dict.fromkeys(("query", "prompt", "completion", "failure", "finish_reason"), _text),
    **dict.fromkeys(("reward", "advantage", "sequence_ratio", "clipped", "mini_batch"), _number),
    **dict.fromkeys(("tokens", "policy_version"), _whole),
    **dict.fromkeys(("prompt_words", "token_characters", "token_log_ratios", "token_advantages"), _list_of_numbers),
    **{"columns": _mapping_of(_plain), "extra": _mapping_of(_plain), "rewards": _mapping_of(_number)},
}
_NEVER_NULL = ("query", "prompt", "completion", "rewards", "tokens", "finish_reason")
