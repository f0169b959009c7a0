"""The judge: what a real local server is asked, and what becomes of each of its answers."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.samples import scores_of

from gspo.errors import UserError
from gspo.recipe.sections import RewardConfig
from gspo.reward import judge as judging
from gspo.reward.functions import close_functions, load_functions
from gspo.reward.score import score
from gspo.types import Score

ASK = "Question: {prompt}\nAnswer: {completion}\nRight: {answer}"
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Server:
    """A server of chat completions that answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = lambda asked: (200, "score: 1")
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                own.asked.append(asked)
                own.keys.append(self.headers["authorization"])
                code, said = own.answer(asked)
                content = {"choices": [{"message": {"role": "assistant", "content": said}}]}
                text = said if isinstance(said, bytes) else json.dumps(content).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(judging.asyncio, "sleep", no_sleep)
    judging._scores.clear()
    yield (own := Server())
    own.http.shutdown()
    own.http.server_close()


SLEEP = judging.asyncio.sleep


async def no_sleep(_: float) -> None:
    """Try again at once, once all others have had their turn: the clients of other tests may sleep meanwhile."""
    await SLEEP(0)


def asked_of(server: Server, completions: Sequence[Any], question: Any = "1 + 1?", **options: Any) -> list[float]:
    given: dict[str, Any] = {"url": server.url, "model": "m", "prompt": ASK, "answer": ["2"] * len(completions)}
    return judging.asyncio.run(judging.judge([question] * len(completions), completions, **{**given, **options}))


def test_each_response_is_asked_about_with_its_prompt_and_columns_and_the_scale_becomes_0_to_1(server: Server) -> None:
    server.answer = lambda asked: (200, f"Fine. score: {len(asked['messages'][-1]['content'])}")
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + {1}?"}]
    completion = [{"role": "assistant", "content": "{answer}"}]
    texts = "Question: system: Add.\n\nuser: 1 + {1}?\nAnswer: {answer}\nRight: 2"
    scores = asked_of(server, [completion], prompt, low=-20, high=180, system="Judge.", body={"top_p": 0.5})
    assert server.asked == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Judge."}, {"role": "user", "content": texts}],
            "top_p": 0.5,
        }
    ]
    assert scores == [pytest.approx((len(texts) + 20) / 200)]
    assert asked_of(server, ["2"], high=100) and server.asked[-1]["temperature"] == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("score: 0.25", 0.25),
        ('I think of {"score": 0} first, but {"reason": "right", "score": 1}', 1.0),
        ("Score = 1. That is all of 3.", 1.0),
        ("**Score:** 0.5", 0.5),
        ("Score: **5e-1**", 0.5),
    ],
)
def test_the_last_score_counts(answer: str, expected: float, server: Server) -> None:
    server.answer = lambda _: (200, answer)
    assert asked_of(server, ["2"]) == [expected]


def test_what_was_answered_is_not_asked_again(server: Server) -> None:
    assert asked_of(server, ["2", "3"]) == asked_of(server, ["3", "2"]) == [1.0, 1.0]
    assert len(server.asked) == 2
    asked_of(server, ["2"], system="Be strict.")
    assert len(server.asked) == 3


def test_what_passes_is_tried_again(server: Server) -> None:
    codes = iter((503, 429, 200))
    server.answer = lambda _: (next(codes), "score: 0.5")
    assert asked_of(server, ["2"]) == [0.5] and len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "num_asked", "failure"),
    [
        ((500, "sorry"), 4, "does not answer: HTTP 500"),
        ((401, "no key"), 1, "does not answer: HTTP 401"),
        ((200, b"<html>"), 1, "this is no chat completion: <html>"),
        ((200, "It is nice."), 1, "answer has no score: 'It is nice.'"),
        ((200, "score: 7"), 1, "score 7 is not between 0 and 1"),
        ((200, ""), 1, "answer has no score: ''"),
    ],
)
def test_an_answer_without_a_score_is_a_failure(
    answer: tuple[int, Any], num_asked: int, failure: str, server: Server
) -> None:
    server.answer = lambda _: answer
    with pytest.raises(RuntimeError, match=failure):
        asked_of(server, ["2"])
    assert len(server.asked) == num_asked


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": r"score: \d"}, "has no group"),
        ({"low": 1, "high": 1}, "low 1 is not below high 1"),
        ({"tries": 0}, "tries is 0, requests 8"),
        ({"prompt": "{solution}"}, r"names \{solution\}, and the row has no such column"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], what: str, server: Server) -> None:
    with pytest.raises(UserError, match=what):
        asked_of(server, ["2"], **options)


def test_one_response_without_a_score_is_masked_and_the_others_of_its_group_are_not(
    server: Server, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answer = lambda asked: (200, "score: 1" if "Answer: 2" in asked["messages"][0]["content"] else "?")
    options = {"url": server.url, "model": "m", "prompt": ASK, "key": "JUDGE_KEY"}
    functions = load_functions([RewardConfig(function="judge", options=options)])
    try:
        batch = score(groups(["2", "3", "2 ", "2"], answer=["2"]), functions, max_masked_fraction=0.5)
    finally:
        close_functions(functions)
    scores: list[Score] = scores_of(batch)
    assert [own.reward for own in scores] == [1.0, None, 1.0, 1.0]
    assert scores[1].failure is not None and "answer has no score: '?'" in scores[1].failure.message
    assert {*server.keys} == {"Bearer secret"}


def test_a_row_that_has_null_in_a_column_of_the_prompt_is_masked(server: Server, groups: Any) -> None:
    options = {"url": server.url, "model": "m", "prompt": ASK}
    functions = load_functions([RewardConfig(function="judge", options=options)])
    try:
        batch = score(groups(["2", "3"], answer=[None]), functions, max_masked_fraction=1.0)
    finally:
        close_functions(functions)
    assert [own.reward for own in scores_of(batch)] == [None, None]
    failure = scores_of(batch)[0].failure
    assert failure is not None and "the row has no answer, which the judge's prompt names" in failure.message
    assert not server.asked
