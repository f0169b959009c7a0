"""Plain data as JSON and back, exactly typed: what passes between sandbox and world. Standard library only.

JSON has None, bool, int, float, str and list; an object of one key stands for each other type:
{"tuple": […]}, {"dict": [[key, value], …]}, {"set": […]}, {"frozenset": […]}, {"bytes": hex},
{"complex": [real, imaginary]} and {"int": hex} for integers whose decimal digits Python would refuse to read.
"""

import json
from collections import Counter, OrderedDict, defaultdict
from typing import Any

MAX_BYTES = 2**23  # of one value as text: read back it takes up to 20 times as much
MAX_DEPTH = 64
_MAX_EQUAL_HASHES = 32  # a dict of keys with one hash takes quadratic time to build
_MAX_SHORT_INT = 2**64


def dumps(value: Any) -> bytes:
    """The value as one line of text; TypeError for any other type, ValueError for too large or deep a one."""
    text = json.dumps(_pack(value, 0), separators=(",", ":")).encode()
    if len(text) > MAX_BYTES:
        raise ValueError(f"the value is longer than {MAX_BYTES} bytes")
    return text


def loads(text: Any) -> Any:
    """The value that `dumps` wrote, as bytes or str; ValueError for anything else, whoever wrote it."""
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"the value is longer than {MAX_BYTES} bytes")
        return _unpack(json.loads(text), 0)
    except Exception as error:  # a program has written it: no list of what that may raise is complete
        raise ValueError(f"the text is no value: {type(error).__name__}") from None


def _pack(value: Any, depth: int) -> Any:
    kind = type(value)
    if depth > MAX_DEPTH:
        raise ValueError(f"the value is deeper than {MAX_DEPTH}")
    if kind is int:
        return value if -_MAX_SHORT_INT < value < _MAX_SHORT_INT else {"int": hex(value)}
    if value is None or kind in (bool, float, str):
        return value
    if kind is list:
        return [_pack(inner, depth + 1) for inner in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_pack(inner, depth + 1) for inner in value]}
    if kind in (dict, Counter, OrderedDict, defaultdict):  # equal to a dict of the same items
        return {"dict": [[_pack(key, depth + 1), _pack(inner, depth + 1)] for key, inner in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"a value of type {kind.__name__} is not plain data")


def _unpack(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"the value is deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_unpack(inner, depth + 1) for inner in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "int":
        return int(inner, 16)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        real, imaginary = inner
        return complex(float(real), float(imaginary))
    items = [_unpack(item[0] if kind == "dict" else item, depth + 1) for item in inner]
    if kind == "tuple":
        return tuple(items)
    if max(Counter(map(hash, items)).values(), default=0) > _MAX_EQUAL_HASHES:
        raise ValueError("too many values of one hash")
    if kind == "dict":
        return dict(zip(items, [_unpack(value, depth + 1) for _, value in inner], strict=True))
    return {"set": set, "frozenset": frozenset}[kind](items)
