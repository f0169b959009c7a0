"""Logs of a line a step, read while a run may still be writing them."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.errors import UserError


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file, none where there is no file, and how many lines are none.

    A last line without its end is still being written: neither read nor counted. Raises UserError where there is a
    file that cannot be read.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        mend = "make it a file that you may read"
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), mend=mend) from None
    found, num_unreadable = [], 0
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if isinstance(content, dict):
            found.append(content)
        elif line.strip():
            num_unreadable += 1
    return found, num_unreadable


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics; null, and what is too large to be a number, read as NaN."""
    return {key: _number(value) for key, value in line.items()}


def is_number(line: Mapping[str, Any], name: str) -> bool:
    """Whether a line has a finite number of that name."""
    value = line.get(name)
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(item) for item in value]
    is_none = value is None or (isinstance(value, int) and abs(value) > sys.float_info.max)
    return math.nan if is_none else value
