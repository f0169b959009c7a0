"""Data as JSON and UTF-8 can hold it, so that whatever is read can be written again."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from gspo.errors import encodable


def writable(value: Any) -> Any:
    """The value with None for each number that is not finite and with encodable text, however deep they lie.

    What needs no change is returned as it is, and so is anything but text, numbers, mappings, lists and tuples.
    """
    if isinstance(value, str):
        text = value if value.isascii() else encodable(value)
        return value if text == value else text
    if isinstance(value, int):  # no float, which it may be too large for
        return value
    if isinstance(value, Real):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        pairs = [(writable(key), writable(its)) for key, its in value.items()]
        same = all(key is old and its is value[old] for (key, its), old in zip(pairs, value, strict=True))
        return value if same else dict(pairs)
    if type(value) in (list, tuple):
        items = [writable(item) for item in value]
        return value if all(item is old for item, old in zip(items, value, strict=True)) else type(value)(items)
    return value
