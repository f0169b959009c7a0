"""Whatever is read can be written: numbers that JSON has no word for, and text that UTF-8 has no bytes for."""

import json
import math
from typing import Any

import numpy as np
import pytest

from gspo.errors import writable


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (-math.inf, None),
        (np.float32("nan"), None),
        ("a\ud800b", "a\\ud800b"),
        ({"a": [1, {"b": (math.nan, "\udfff")}], "\ud800": 2}, {"a": [1, {"b": (None, "\\udfff")}], "\\ud800": 2}),
    ],
)
def test_what_cannot_be_written_is_replaced_however_deep_it_lies(value: Any, expected: Any) -> None:
    assert writable(value) == expected
    json.dumps(writable(value), allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("value", ["é😀", 1.5, True, None, 10**400, {"a": [{"b": "é"}], "c": (1, 2.0)}, b"\xff", {1}])
def test_what_can_be_written_stays_equal(value: Any) -> None:
    assert writable(value) == value
