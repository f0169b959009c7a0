"""What a reward's process sends is checked where it is read: a function may have found the connection."""

import math
import re
from typing import Any

import pytest
from tests.samples import scores_of

from gspo.reward.reply import Reply, read_reply
from gspo.reward.score import score

# The function finds its connection and sends what it likes before it returns.
FORGER = """
    import gc, json
    from multiprocessing.connection import Connection
    def f(completions, **columns):
        if "bad" in completions:
            link = next(thing for thing in gc.get_objects() if isinstance(thing, Connection))
            link.send_bytes({message})
        return [1.0] * len(completions)
"""
MESSAGES = (
    "b'garbage'",
    "b''",
    "b'\\xff\\xfe'",
    "b'[' * 100000",
    "b'{}'",
    "b'[]'",
    "b'3'",
    "b'null'",
    "b'[3]'",
    "b'[0, [{\"values\": [1.0]}]]'",
    "b'[1, [{}, {}]]'",
    "b'[1, 3]'",
    "b'[null, [[3]]]'",
)


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_that_is_none_masks_the_response_with_the_reason(
    message: str, groups: Any, named: Any, capfd: Any
) -> None:
    scored = score(groups(["bad"], *[["good"]] * 5), [named(FORGER.format(message=message))])
    assert [one.reward for one in scores_of(scored)] == [None] + [1.0] * 5
    failure = scores_of(scored)[0].failure
    assert failure is not None and "says what is no message: b" in failure.message and len(failure.message) < 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"values": [1.0, math.nan]}, "it returns nan"),
        ({"values": [1.0, math.inf]}, "it returns inf"),
        ({"values": [1.0, 10**400]}, "what is no reply"),
        ({"values": [1.0, [1.0, math.nan]]}, "it returns nan as number 2 of 2"),
        ({"values": [1.0, [[1.0]]]}, "it returns"),
        ({"values": [1.0, {}]}, "it returns {}"),
        ({"values": [1.0]}, "1 values for 2 completions"),
        ({"values": 3}, "it returns 3 for 2"),
        ({}, "0 values"),
        ({"values": [1.0, 1.0], "more": 1}, "what is no reply"),
        ({"values": [1.0, 1.0], "kind": "timed_out"}, "what is no reply"),
        ({"values": [1.0, 1.0], "kind": []}, "what is no reply"),
        ({"values": [1.0, 1.0], "what": 3}, "what is no reply"),
        ({"user_error": "x"}, "what is no reply"),
        ({"user_error": ["what"]}, "what is no reply"),
        ({"user_error": [1, 2, 3]}, "what is no reply"),
    ],
)
def test_a_reply_that_is_none_counts_as_failed(fields: dict[str, Any], said: str) -> None:
    reply = read_reply(fields, 2)
    whats = [reply.what, *(value for value in reply.values if isinstance(value, str))]
    assert any(re.search(re.escape(said), what) for what in whats), reply


def test_what_a_process_says_is_read_as_it_was_meant() -> None:
    for reply in (
        Reply(values=[1.0, None]),
        Reply(values=["it returns 'x' for a completion", [1.0, 2.0]]),
        Reply(kind="raised", what="it raises KeyError"),
        Reply(user_error=["what", None, "fix"]),
    ):
        assert read_reply(vars(reply), 2) == reply
