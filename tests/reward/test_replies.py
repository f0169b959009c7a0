"""What a reward's process sends is checked where it is read: a function may have found the connection."""

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from tests.samples import scores_of

from gspo.reward.calls import MESSAGE, _Worker
from gspo.reward.reply import Reply
from gspo.reward.score import score

# The function finds its connection and sends what it likes before it returns.
FORGER = """
    import gc, json, socket
    def f(completions, **columns):
        if "bad" in completions:
            link = next(thing for thing in gc.get_objects() if isinstance(thing, socket.socket))
            message = {message}
            link.sendall(message + b"\\n")
        return [1.0] * len(completions)
"""
FORGED: tuple[dict[str, Any], ...] = (
    {"values": [math.nan]},
    {"values": [math.inf]},
    {"values": [10**400]},
    {"values": [1e101]},
    {"values": [[1.0, math.nan]]},
    {"values": [[[1.0]]]},
    {"values": [True]},
    {"values": [{}]},
    {"values": [1.0, 1.0]},
    {"values": 3},
    {},
    {"values": [1.0], "kind": "none"},
    {"values": [1.0], "kind": []},
    {"values": [1.0], "what": 3},
    {"values": [1.0], "metrics": {"x": [math.nan, 1]}},
    {"values": [1.0], "metrics": {"x": [1e101, 1]}},
    {"values": [1.0], "metrics": {"x": [0.0, 0]}},
    {"values": [1.0], "columns": {"x": [1, 2]}},
    {"values": [1.0], "columns": {"x": [[1]]}},
    {"values": [1.0], "refused": ["a"]},
    {"user_error": "x"},
    {"user_error": ["what"]},
    {"user_error": [1, 2, 3]},
)
MESSAGES = (
    b"garbage",
    b"",
    b"\xff\xfe",
    b"[" * 100000,
    b"{}",
    b"[]",
    b"3",
    b"null",
    b"[3]",
    b'[0, {"values": [1.0]}]',
    b"[1, {}, {}]",
    b"[1, 3]",
    b"[null, [[3]]]",
    *(json.dumps([1, fields]).encode() for fields in FORGED),  # 1: the first request after that whether it is ready
)


async def read(message: bytes) -> tuple[Reply | None, str]:
    """What the reader makes of a line while one value is due for request 1: the reply, and what it says is none."""
    worker, lines, due = object.__new__(_Worker), asyncio.StreamReader(), asyncio.get_running_loop().create_future()
    worker.garbled, worker._due = "", {1: (1, due)}
    worker._writer = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    lines.feed_data(message + b"\n")
    lines.feed_eof()
    await worker._read(lines)
    return await due, worker.garbled


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_is_none_is_no_reply_and_the_last_that_is_read(message: bytes) -> None:
    reply, garbled = asyncio.run(read(message))
    assert reply is None and garbled.startswith("its process says what is no message: b") and len(garbled) < 200


def test_a_message_that_is_one_is_the_reply() -> None:
    assert asyncio.run(read(b'[1, {"values": [1.0]}]')) == (Reply(values=[1.0]), "")


@pytest.mark.parametrize("message", [b"garbage", b'[1, {"values": [1.0, 1.0]}]'])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_that_is_none_masks_the_response_with_the_reason(
    message: bytes, groups: Any, named: Any, capfd: Any
) -> None:
    scored = score(groups(["bad"], *[["good"]] * 5), [named(FORGER.format(message=message))])
    assert [one.reward for one in scores_of(scored)] == [None] + [1.0] * 5
    failure = scores_of(scored)[0].failure
    assert failure is not None and "says what is no message: b" in failure.message and len(failure.message) < 200
    assert "Traceback" not in capfd.readouterr().err


def test_what_a_process_says_is_read_as_it_was_meant() -> None:
    replies = [
        Reply(values=[1.0, None]),
        Reply(values=["it returns 'x' for a completion", [1.0, 2.0]]),
        Reply(values=[1.0], metrics={"a b": (0.5, 2)}, columns={"c": ["x"], "d": [True], "e": [3], "f": [None]}),
        Reply(kind="raised", what="it raises KeyError"),
        Reply(user_error=("what", None, "fix")),
    ]
    for reply in replies:
        assert MESSAGE.validate_json(json.dumps([7, vars(reply)]), strict=True) == (7, reply)


def test_an_error_with_half_a_character_in_it_is_read_too(groups: Any, named: Any) -> None:
    source = """
        def f(completions, **columns):
            if "bad" in completions:
                raise ValueError("\\ud800")
            return [1.0] * len(completions)
    """
    scored = score(groups(["bad"], *[["good"]] * 5), [named(source)])
    failure = scores_of(scored)[0].failure
    assert failure is not None and failure.kind == "raised" and r"it raises ValueError: \ud800" in failure.message
