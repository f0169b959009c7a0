"""Tools in processes of their own: what they return, what becomes of errors, and what is refused before a run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo import loop
from gspo.errors import UserError
from gspo.loop import all_of
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.reward.tool_functions import calculator
from gspo.reward.tools import load_tools
from gspo.rollout.tools import Result, Tool, Tools

OWN = '''
import asyncio, os, sys, time

def shout(text: str, times: int = 1) -> str:
    """Shout.

    Args:
        text: What.
        times: How often.
    """
    print("a tool may print")
    sys.stdout.flush()
    return text.upper() * times

def give(kind: str):
    """Give something.

    Args:
        kind: What.
    """
    if kind == "exit":
        os._exit(3)
    if kind == "sleep":
        time.sleep(600)
    if kind == "leave":
        raise SystemExit("bye")
    return {"none": None, "bytes": b"x", "table": {"a": [1, 2.5]}, "long": "x" * 10_000_000, "half": "\\ud800"}[kind]

async def meet(place: int) -> str:
    """Wait for all others.

    Args:
        place: Which of them.
    """
    met.append(place)
    while len(met) < 100:
        await asyncio.sleep(0.01)
    return str(sum(met))

met = []

def bare(x): ...

def places(*words: str) -> str:
    """Take words.

    Args:
        words: Which.
    """
'''


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tool]]:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    made: list[Tools] = []

    def load(*names: str, **settings: Any) -> Tool:
        made.append(load_tools(RolloutConfig(tools=names, **settings), None, QueriesConfig()))
        return next(iter(made[-1].by_name.values()))

    yield load
    for tools in made:
        tools.close()


def answer(tool: Tool, **arguments: Any) -> Result:
    return loop.run(tool.call("", arguments))  # type: ignore[arg-type]


def test_a_function_is_called_with_the_arguments_that_its_annotations_take(loaded: Any) -> None:
    shout = loaded("own.py:shout")
    assert answer(shout, text="hi") == Result(text="HI")
    assert answer(shout, text="hi", times="3") == Result(text="HIHIHI")  # as a model may well write it
    for arguments, said in [
        (dict[str, Any](), "error: text: Missing required argument"),
        ({"text": "hi", "times": "x"}, "error: times: Input should be a valid integer"),
        ({"text": "hi", "loud": 1}, "error: loud: Unexpected keyword argument"),
    ]:
        result = answer(shout, **arguments)
        assert result.is_error and result.text.startswith(said) and result.failure is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [("none", "null"), ("bytes", "\"b'x'\""), ("table", '{"a": [1, 2.5]}'), ("long", "x" * 50), ("half", "\\ud800")],
)
def test_whatever_a_function_returns_is_a_text(kind: str, text: str, loaded: Any) -> None:
    assert answer(loaded("own.py:give", tool_characters=50), kind=kind) == Result(text=text)


def test_an_error_is_read_by_the_policy_and_no_answer_is_a_failure(loaded: Any) -> None:
    give = loaded("own.py:give", tool_seconds=2.0)
    assert answer(give, kind="other") == Result(text="error: KeyError: 'other'", is_error=True)
    left = answer(give, kind="leave")
    assert left == Result(text="error: SystemExit: bye", is_error=True)
    ended = answer(give, kind="exit").failure
    assert ended is not None and (ended.kind, ended.message) == (
        "crashed",
        "tool give: its process ended with exit status 3",
    )
    late = answer(give, kind="sleep").failure
    assert late is not None and late.kind == "timed_out" and late.message.startswith("tool give: it ran over its time")
    assert answer(give, kind="none") == Result(text="null")


def test_calls_of_an_async_function_are_all_made_at_the_same_time(loaded: Any) -> None:
    meet = loaded("own.py:meet")
    results = loop.run(all_of([meet.call("", {"place": place}) for place in range(100)]))
    assert results == [Result(text="4950")] * 100


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("own.py:bare",), r"own\.py:bare does not describe itself(.|\n)*def lookup\(word: str\) -> str:"),
        (("own.py:places",), "takes words by position, and a call names its arguments"),
        (("own.py:shout", "own.py:shout"), "two tools are named shout"),
        (("calculater",), "no built-in tool 'calculater'(.|\n)*did you mean calculator"),
        (("own.py:none",), "has no function 'none'"),
        (("other.py:none",), r"no such file other\.py"),
    ],
)
def test_what_is_no_tool_is_refused(names: tuple[str, ...], sentence: str, loaded: Any) -> None:
    with pytest.raises(UserError, match=sentence):
        loaded(*names)


def test_the_calculator_computes_as_python_does_and_nothing_else() -> None:
    for text in ("1 + 2 * 3", "-(2 - 5) ** 3", "7 // 2 % 3", "2 ** 100", "+1.5 * 4", " 3*(4+5)"):
        assert calculator(text) == f"{eval(text):.12g}" or calculator(text) == str(eval(text))
    assert calculator("1 / 3") == "0.333333333333" and calculator("6 / 2") == "3"
    for text in (
        "9 ** 9 ** 9",
        "10 ** 9999",
        "(-1) ** 0.5",
        "x",
        "True",
        "'a' * 3",
        "f()",
        "1 if 1 else 2",
        "[1]",
        "2 ** 1e9",
    ):
        with pytest.raises((ValueError, OverflowError)):
            calculator(text)
    for text in ("", "1 +", "1 / 0", "1; 2"):
        with pytest.raises((SyntaxError, ZeroDivisionError)):
            calculator(text)
