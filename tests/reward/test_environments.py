"""Environments in their process: a thread and a state for each response, and one message for each fault."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo import loop
from gspo.errors import UserError
from gspo.loop import all_of
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.reward.tools import load_tools
from gspo.rollout.tools import Tools
from gspo.types import Query

OWN = '''
import os, threading, time

class Game:
    """Plays."""

    def reset(self, **row):
        self.calls = []
        return "error: 404 is what a page says"

    def play(self, kind: str) -> str:
        """Play.

        Args:
            kind: How.
        """
        self.calls.append(kind)
        if kind == "hang":
            threading.Event().wait()
        if kind == "exit":
            os._exit(1)
        if kind == "stop":
            next(iter([]))
        if kind == "leave":
            raise SystemExit("bye")
        if kind == "together":
            BARRIER.wait()
        return "\\0lost" if kind == "forge" else " ".join(self.calls)

    @staticmethod
    def aside(word: str) -> str:
        return word

    def get_reward(self):
        return eval(self.calls[-1]) if self.calls else None

BARRIER = threading.Barrier(64)

class Quiz:
    """Asks by messages, and counts."""

    def reset(self, row):
        self.said = [row["prompt"]]
        return [{"role": "user", "content": "first"}, {"role": "user", "content": "then"}]

    def step(self, answer):
        self.said.append(answer)
        if answer == "exit":
            os._exit(1)
        return eval(answer)

class Late(Quiz):
    async def step(self, text, /):
        self.said.append(text)
        return " ".join(self.said), 0.5, len(self.said) > 2

class Named:
    """Plays in TRL's form, with a tool that is named step."""

    def reset(self, **row):
        return None

    def step(self, text: str) -> str:
        """Step.

        Args:
            text: How.
        """
        return text

class Seeded(Quiz):
    def reset(self, row, seed=0):
        return super().reset(row)

class Bare(Quiz):
    def reset():
        return None

class Fixed(Quiz):
    reset = None

class Both(Quiz):
    def get_reward(self):
        return 1.0

class Misspelt:
    def reset(self, **row):
        return None

    def get_rewards(self):
        return 1.0
'''
Call = Callable[..., Any]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tools]]:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    made: list[Tools] = []

    def load(**settings: Any) -> Tools:
        given = RolloutConfig(**{"environment": "own.py:Game", "tool_seconds": 60.0, **settings})
        made.append(load_tools(given, None, QueriesConfig(chat=False)))
        return made[-1]

    yield load
    for tools in made:
        tools.close()


async def played(tools: Tools, session: str, *kinds: str) -> Sequence[Any]:
    """What a response that makes these calls in one turn reads, from its beginning."""
    assert await tools.begin(session, QUERY) == "error: 404 is what a page says"
    return await tools.answers(session, [json.dumps({"name": "play", "arguments": {"kind": k}}) for k in kinds])


PLAY = '{"name": "play", "arguments": {"kind": "%s"}}'
QUERY = Query(id="q", prompt="?", text="?", prompt_ids=(1,), columns={})


def test_all_responses_compute_at_the_same_time_and_one_that_hangs_keeps_none_from_it(loaded: Any) -> None:
    tools = loaded()
    sessions = [f"s{number}" for number in range(64)]  # more than a pool of threads has on two cores

    async def run() -> list[Sequence[Any]]:
        return await all_of([played(tools, session, "together") for session in sessions])

    assert [result.text for (result,) in loop.run(run())] == ["together"] * 64
    short = loaded(tool_seconds=2.0)

    async def beside() -> list[Sequence[Any]]:
        return await all_of([played(short, f"s{n}", "hang" if n < 8 else "x") for n in range(12)])

    results = [result for (result,) in loop.run(beside())]
    assert [result.failure.kind if result.failure else result.text for result in results] == ["timed_out"] * 8 + [
        "x"
    ] * 4


def test_calls_behind_one_without_an_answer_are_not_made(loaded: Any) -> None:
    results = loop.run(played(loaded(tool_seconds=0.5), "s", "a", "hang", "b", "c"))
    assert [result.text for result in results] == ["a", ""] and results[-1].failure.kind == "timed_out"


def test_a_process_that_ends_loses_what_was_in_it_and_no_more(loaded: Any) -> None:
    tools = loaded()

    async def run() -> Sequence[Any]:
        await played(tools, "before", "a")
        await all_of([tools.begin(f"s{number}", QUERY) for number in range(4)])
        lost = await all_of([tools.answers(f"s{n}", [PLAY % ("hang" if n else "exit")]) for n in range(4)])
        later = [await played(tools, f"later{number}", "a", "b") for number in range(3)]
        before = await tools.answers("before", [PLAY % "b"])
        return [*lost, before, *later]

    *lost, one, two, three = loop.run(run())
    assert [result.failure.kind for (result,) in lost] == ["crashed"] * 5
    assert [[result.text for result in results] for results in (one, two, three)] == [["a", "a b"]] * 3


@pytest.mark.parametrize(
    ("kind", "text"), [("stop", "error: StopIteration: "), ("leave", "error: SystemExit: bye"), ("forge", "\0lost")]
)
def test_whatever_a_method_raises_or_returns_is_read_by_the_policy(kind: str, text: str, loaded: Any) -> None:
    (result,) = loop.run(played(loaded(), "s", kind))
    assert (result.text, result.failure) == (text, None)


@pytest.mark.parametrize(
    ("said", "reward"),
    [("1.2e-05", 1.2e-05), ("10/3", 10 / 3), ("True", 1.0), ("__import__('numpy').bool_(True)", 1.0), ("None", None)],
)
def test_a_reward_is_the_number_that_get_reward_returns_whatever_results_are_cut_to(
    said: str, reward: float | None, loaded: Any
) -> None:
    tools = loaded(tool_characters=3)

    async def run() -> Any:
        await tools.begin("s", QUERY)
        await tools.answers("s", [json.dumps({"name": "play", "arguments": {"kind": said}})])
        return await tools.reward("s")

    assert loop.run(run()) == (reward, None)


@pytest.mark.parametrize(("said", "why"), [("'1'", "returns '1'"), ("1/0", "raises ZeroDivisionError")])
def test_a_reward_that_is_none_says_why(said: str, why: str, loaded: Any) -> None:
    tools = loaded()

    async def run() -> Any:
        await played(tools, "s", said)
        return await tools.reward("s")

    reward, failure = loop.run(run())
    assert reward is None and failure.kind == "raised" and f"Game.get_reward {why}" in failure.message


def test_a_response_that_has_ended_is_forgotten(loaded: Any) -> None:
    tools = loaded()

    async def run() -> Any:
        await played(tools, "s", "a")
        await tools.end("s")
        return await tools.answer("s", PLAY % "a")

    assert loop.run(run()).failure.kind == "crashed"


def test_static_methods_are_no_tools_and_a_class_is_none(loaded: Any) -> None:
    assert list(loaded().by_name) == ["play"]
    with pytest.raises(UserError, match=r"own\.py:Game is a class\n  fix: set rollout\.environment: own\.py:Game"):
        loaded(environment=None, tools=["own.py:Game"])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("('next', 1, False)", ("next", 1.0, False)),
        ("([{'role': 'user', 'content': 'a'}, {'content': 'b'}], None, 0)", ("a\n\nb", None, False)),
        ("(None, -0.25, __import__('numpy').bool_(True))", ("", -0.25, True)),
        (r"('\ud800 is wrong', 0, False)", ("\\ud800 is wrong", 0.0, False)),  # no half of a pair has bytes
    ],
)
def test_a_step_gives_messages_a_reward_and_whether_it_is_over(answer: str, expected: Any, loaded: Any) -> None:
    tools = loaded(environment="own.py:Quiz")

    async def run() -> Any:
        return await tools.begin("s", QUERY), await tools.step("s", answer)

    assert loop.run(run()) == ("first\n\nthen", expected)
    assert not tools.by_name and tools.environment.by_steps and tools.bridge.speaker == "user"


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        ("1/0", "raised", "Quiz.step raises ZeroDivisionError: division by zero"),
        ("'done'", "raised", "Quiz.step returns 'done', which is not: messages, the turn's reward or None"),
        ("('a', 1)", "raised", "Quiz.step returns ('a', 1), which is not: messages"),
        ("('a', 1, 'no')", "raised", "which is not: messages"),
        ("('a', 'x', False)", "raised", "Quiz.step returns 'x', which is no finite number"),
        ("('a', float('nan'), False)", "raised", "Quiz.step returns nan, which is no finite number"),
        ("(b'a', 1, False)", "raised", "Quiz.step says b'a', which is neither a text nor a list such as"),
        ("([{'role': 'user'}], 1, False)", "raised", "which is neither a text nor a list such as"),
        ("exit", "crashed", "tool Quiz"),
    ],
)
def test_a_step_without_an_answer_says_why(answer: str, kind: str, why: str, loaded: Any) -> None:
    tools = loaded(environment="own.py:Quiz")

    async def run() -> Any:
        await tools.begin("s", QUERY)
        return await tools.step("s", answer)

    failure = loop.run(run())
    assert failure.kind == kind and why in failure.message


def test_a_step_may_be_async_and_each_response_has_its_own(loaded: Any) -> None:
    tools = loaded(environment="own.py:Late")

    async def run() -> Any:
        await all_of([tools.begin(session, QUERY) for session in "ab"])
        return [await tools.step(*call) for call in (("a", "x"), ("b", "y"), ("a", "z"))]

    assert loop.run(run()) == [("? x", 0.5, False), ("? y", 0.5, False), ("? x z", 0.5, True)]


def test_a_tool_may_be_named_step_and_an_environment_has_one_form(loaded: Any) -> None:
    tools = loaded(environment="own.py:Named")
    assert list(tools.by_name) == ["step"] and tools.bridge.speaker == "tool"
    assert loaded(environment="own.py:Seeded").environment.by_steps
    for name in ("Bare", "Fixed"):
        with pytest.raises(UserError):
            loop.run(loaded(environment=f"own.py:{name}").begin("s", QUERY))
    with pytest.raises(UserError, match=r"step returns the rewards\n  fix: leave out get_reward"):
        loaded(environment="own.py:Both")


def test_a_method_that_is_misspelt_is_named_as_it_was_meant(loaded: Any) -> None:
    with pytest.raises(UserError, match=r"get_rewards of own\.py:Misspelt has no docstring; did you mean get_reward\?"):
        loaded(environment="own.py:Misspelt")
