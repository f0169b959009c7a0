"""Data as JSON and UTF-8 can hold it, so that whatever is read can be written again."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from gspo.errors import encodable


def writable(value: Any) -> Any:
    """The value with None for each number that is not finite and with encodable text, however deep they lie.

    What needs no change compares equal; anything but text, numbers, mappings, lists and tuples is returned as it is.
    """
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {writable(key): writable(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(writable, value))
    # No integer is made a float, which it may be too large for.
    is_infinite = isinstance(value, Real) and not isinstance(value, int) and not math.isfinite(value)
    return None if is_infinite else value
