"""A message is one that a terminal can show: bounded, and of text that has bytes."""

import pytest

from gspo.errors import MAX_BYTES, UserError


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
