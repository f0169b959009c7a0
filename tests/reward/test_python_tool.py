"""The built-in interpreter: names last for a response and no longer, and what code does wrong is read by the policy."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.needs import needs

from gspo import loop
from gspo.errors import UserError
from gspo.loop import all_of
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.reward.tools import load_tools
from gspo.rollout.tools import Tools
from gspo.types import Query

pytestmark = needs("sandbox")
QUERY = Query(id="q", prompt="?", text="?", prompt_ids=(1,), columns={"answer": "5"})


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    made = load_tools(RolloutConfig(environment="python"), None, QueriesConfig(chat=False))
    yield made
    made.close()


async def conversation(tools: Tools, session: str, *codes: str) -> list[str]:
    await tools.begin(session, QUERY)
    calls = [json.dumps({"name": "python", "arguments": {"code": code}}) for code in codes]
    results = await tools.answers(session, calls)
    assert not any(result.failure for result in results)
    await tools.end(session)
    return [result.text for result in results]


def said(tools: Tools, *codes: str) -> list[str]:
    return loop.run(conversation(tools, "s", *codes))


def test_names_keep_their_values_and_earlier_prints_are_not_repeated(tools: Tools) -> None:
    codes = [
        "import math, sys\nx = 3\nprint('aside', file=sys.stderr)\nprint('once')",
        "x += 1",
        "def f(y):\n    return x * y\nf(2)",
        "math.floor(x / 3)",
    ]
    assert said(tools, *codes) == ["once", "", "8", "1"]


def test_responses_do_not_share_names(tools: Tools) -> None:
    async def all_at_once() -> Any:
        return await all_of([conversation(tools, f"s{n}", f"x = {n}", "x", "'y' in dir()", "y = 1") for n in range(12)])

    assert loop.run(all_at_once()) == [["", str(n), "False", ""] for n in range(12)]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "error: ZeroDivisionError: division by zero"),
        ("print('a')\nz", """error: NameError: name 'z' is not defined; printed before: "a\\n\""""),
        ("def", "SyntaxError"),
        ("while True: pass", "error: the code did not run to its end, limit: cpu_time"),
        ("x = bytearray(2**31)", "limit: memory"),
        ("open('/etc/passwd')", "FileNotFoundError"),
        ("import os\nos._exit(3)", "error: the code did not run to its end, it has ended the interpreter"),
        ("import os\nos._exit(0)", "it has ended the interpreter"),
    ],
)
def test_what_code_does_wrong_is_read_and_the_response_goes_on(code: str, error: str, tools: Tools) -> None:
    first, wrong, last = said(tools, "x = 5", code, "x")
    assert (first, last) == ("", "5") and wrong.startswith("error: ") and error in wrong


def test_a_call_that_raised_has_done_what_it_did_before(tools: Tools) -> None:
    assert said(tools, "x = 1\nraise ValueError(x)\nx = 2", "x", "import sys\nsys.exit(0)\nx = 3", "x")[1::2] == [
        "1",
        "1",
    ]


def test_code_that_waits_costs_no_other_response_its_answer() -> None:
    settings = RolloutConfig(environment="python", tool_seconds=12.0)  # eight that wait take 16 on two cores
    with closing(load_tools(settings, None, QueriesConfig(chat=False))) as tools:

        async def all_at_once() -> Any:
            slow = [conversation(tools, f"slow{n}", "import time\ntime.sleep(4)\n7") for n in range(8)]
            return await all_of([*slow, *(conversation(tools, f"s{n}", f"{n}") for n in range(4))])

        assert loop.run(all_at_once()) == [["7"]] * 8 + [[str(n)] for n in range(4)]


def test_random_numbers_are_drawn_once(tools: Tools) -> None:
    draw = "import random\nimport numpy as np\nx, y = random.random(), np.random.rand()\n(x, float(y))"
    first, second = said(tools, draw, "(x, float(y))")
    assert first == second


def test_code_cannot_say_that_it_ran_to_its_end(tools: Tools) -> None:
    assert said(tools, "print('\\0end', flush=True)\nimport os\nos._exit(0)", "1")[1] == "1"


def test_it_is_an_environment_and_says_what_it_takes(tools: Tools) -> None:
    (schema,) = (tool.schema["function"] for tool in tools.by_name.values())
    assert schema["name"] == "python" and list(schema["parameters"]["properties"]) == ["code"]
    with pytest.raises(UserError, match=r"python is a class\n  fix: set rollout\.environment: python"):
        load_tools(RolloutConfig(tools=("python",)), None, QueriesConfig(chat=False))
