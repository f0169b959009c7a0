"""A message is one that a terminal can show: bounded, and of text that has bytes; what is read can be written."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo.errors import MAX_BYTES, UserError, files_beside, writable


@pytest.mark.parametrize("text", ["x" * 10**6, "é" * 10**6, "\ud800" * 10**5])
def test_a_message_is_bounded_whatever_it_quotes_and_keeps_where_and_how_to_mend_it(text: str) -> None:
    for what, where, fix in ((text, "here", "do this"), ("short", text, "do this"), (text, text, text)):
        error = UserError(what, where=where, fix=fix)
        assert len(str(error).encode()) <= MAX_BYTES
        assert "\n  fix: " in str(error)
        assert len(str(UserError(error.what, where=error.where, fix=error.fix)).encode()) <= MAX_BYTES
    assert str(UserError(text, where="here", fix="do this")).startswith("here: ")
    assert str(UserError(text, where="here", fix="do this")).endswith("do this")


def test_a_cut_message_keeps_its_beginning_and_its_end() -> None:
    said = str(UserError("first " + "x" * 5000 + " last"))
    assert said.startswith("first x") and " … " in said and said.endswith("x last")


def test_a_short_message_is_as_it_was_written() -> None:
    error = UserError("it is wrong", where="a key", fix="write another")
    assert (error.what, error.where, error.fix) == ("it is wrong", "a key", "write another")
    assert str(error) == "a key: it is wrong\n  fix: write another"
    assert str(UserError("ü")) == "ü"


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
def test_what_can_be_written_is_not_copied(value: Any) -> None:
    assert writable(value) is value


def test_the_files_beside_one_that_is_not_there_are_named(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c.txt"):
        (tmp_path / name).touch()
    assert files_beside(tmp_path / "x.py", ".py") == f"there are: {tmp_path / 'a.py'}, {tmp_path / 'b.py'}"
    assert str(Path.cwd()) in files_beside(tmp_path / "x.csv", ".csv")
