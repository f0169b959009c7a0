"""What the metrics of every subject are made of: NaN, which is written as null, stands for what does not exist."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

_LARGEST = 1e100  # sums and squares of numbers below it are numbers, too
DEPTH = 3  # of lists in lists: a number a layer a mini-batch, and one to spare
Metrics = dict[str, float | list[float] | list[list[float]]]


def fraction(part: float, whole: float) -> float:
    """NaN where there is nothing to divide by."""
    return part / whole if whole else math.nan


def mean(values: Sequence[float]) -> float:
    """NaN of nothing, and of infinities that cancel: a step that diverged still gets its line."""
    return fraction(sum(values), len(values))


def is_number(value: Any) -> TypeGuard[float]:
    """Tell whether it is a number that can be reckoned with: finite, and not so large that a sum is not."""
    return isinstance(value, int | float) and abs(value) < _LARGEST


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a line of metrics and its lists of them; null, and what is too large to be one, read as NaN."""
    return {name: read for name, value in line.items() if (read := _read(value, DEPTH)) is not None}


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics by name, those of a list as name/0, name/1, …; no null.

    Lists by mini-batch, length, layer or update are left out: they are too many for a chart each.
    """
    flat: dict[str, Any] = {}
    for name, value in line.items():
        places = enumerate(value) if isinstance(value, list) and "_by_" not in name else ()
        flat |= {f"{name}/{place}": item for place, item in places} or {name: value}
    return {name: value for name, value in flat.items() if name != "step" and is_number(value)}


def _read(value: Any, depth: int) -> Any:
    if isinstance(value, list) and depth:
        return [math.nan if (number := _read(item, depth - 1)) is None else number for item in value]
    if value is None or isinstance(value, int | float):
        return value if is_number(value) else math.nan
    return None
