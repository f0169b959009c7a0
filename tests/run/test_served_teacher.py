"""A teacher on a server: the run is the one with the teacher beside it, and what the server cannot do is refused."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breaking_off import train
from tests.run.test_teacher_run import ANOTHER, HINT, taught
from tests.samples import query_of, sample_of, scored
from tests.small_model import save_small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.errors import RunError, UserError
from gspo.learner import served_teacher
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import TeacherConfig
from gspo.types import Group

TOLERANCE = 1e-5  # nats a token: the texts of a batch are read one by one
Answer = Callable[[str, Any], Any]  # to a path and a request


class TeacherServer:
    """Answers as vLLM does, with a model in this process; `instead` may answer in its place."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained("teacher")
        self.tokenizer, self.longest = AutoTokenizer.from_pretrained("teacher"), 2048
        self.instead: Answer = lambda path, body: None
        self.asked, own = list[Any](), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, body: Any) -> None:
                own.asked.append(body)
                answer = own.instead(self.path, body) or own.answer(self.path, body)
                text = json.dumps(answer).encode()
                self.send_response(answer if isinstance(answer, int) else 200)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 128

        self.http = Http(("127.0.0.1", 0), Handler)
        self.keys = (f"teacher.url=http://127.0.0.1:{self.http.server_address[1]}", "teacher.model=big")
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> Any:
        """What vLLM would say."""
        if path == "/v1/models":
            return {"data": [{"id": "big", "max_model_len": self.longest}]}
        if path == "/detokenize":
            return {"prompt": self.tokenizer.decode(body["tokens"])}
        assert (path, body["model"], body["prompt_logprobs"]) == ("/v1/completions", "big", 0)
        ids = body["prompt"]
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        scored = [{str(token): {"logprob": float(row[token])}} for token, row in zip(ids[1:], logprobs, strict=False)]
        return {"choices": [{"prompt_logprobs": [None, *scored]}]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TeacherServer]:
    monkeypatch.setattr(served_teacher, "WAIT_SECONDS", 0.0)
    torch.manual_seed(1)
    save_small_model(Path("teacher"), initializer_range=0.3)  # far from the student
    taught()  # saves that one
    yield (own := TeacherServer())
    own.http.shutdown()
    own.http.server_close()


def from_server(server: TeacherServer, *keys: str) -> Recipe:
    return taught(*server.keys, *keys, name="served")


@pytest.mark.parametrize("keys", [(), (HINT, "teacher.advantage_weight=0")], ids=["its prompt", "a hint"])
def test_a_run_taught_by_a_server_is_the_one_with_the_teacher_beside_it(
    keys: tuple[str, ...], server: TeacherServer
) -> None:
    beside, served = train(taught(ANOTHER, *keys)).metrics, train(from_server(server, *keys)).metrics
    names = ("teacher/kl", "policy/grad_norm", "reward/mean")
    for name in names:
        own = pytest.approx([line[name] for line in beside], abs=TOLERANCE, rel=1e-3)
        assert [line[name] for line in served] == own
    assert all(abs(line["teacher/kl"]) > 0.01 for line in served)


def test_what_fails_is_asked_again_and_a_server_that_is_gone_loses_nothing(server: TeacherServer) -> None:
    whole = train(taught(*server.keys, name="whole")).metrics
    lock, failures = threading.Lock(), Counter[str]()

    def fail_sometimes(path: str, body: Any) -> Any:
        with lock:
            failures[str(body)] += 1
            return 503 if path == "/v1/completions" and failures[str(body)] <= 3 else None

    server.instead = fail_sometimes
    first = train(from_server(server, "steps=1")).metrics
    server.instead = lambda path, body: 503 if path == "/v1/completions" else None
    with pytest.raises(RunError, match=r"the teacher at http://127.*status 503(.|\n)*then resume"):
        train(from_server(server), resume=True)
    server.instead = lambda path, body: None
    lines = train(from_server(server), resume=True).metrics
    assert lines[0]["teacher/kl"] == first[0]["teacher/kl"]
    for name in ("teacher/kl", "policy/grad_norm"):
        assert [line[name] for line in lines] == [line[name] for line in whole]


REFUSED: dict[str, Answer] = {
    r"its tokens are not the policy's.*differ first in": lambda path, body: (
        path == "/detokenize" and {"prompt": AutoTokenizer.from_pretrained("other").decode(body["tokens"])}
    ),
    "does not prove that its tokens are the policy's: /detokenize: status 404": lambda path, body: (
        404 if path == "/detokenize" else None
    ),
    "does not prove(.|\n)*KeyError: 'data'": lambda path, body: path == "/v1/models" and {"x": 1},
    "the server has no model big(.|\n)*one that it has: small": lambda path, body: (
        path == "/v1/models" and {"data": [{"id": "small", "max_model_len": 2048}]}
    ),
    "it reads 20 tokens; a prompt and its response may have": lambda path, body: (
        path == "/v1/models" and {"data": [{"id": "big", "max_model_len": 20}]}
    ),
}


@pytest.mark.parametrize("refusal", REFUSED)
def test_a_server_that_cannot_teach_is_refused_before_anything_is_made(refusal: str, server: TeacherServer) -> None:
    save_small_model(Path("other"))
    text = json.loads(Path("other/tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    Path("other/tokenizer.json").write_text(json.dumps(text))
    server.instead = REFUSED[refusal]
    with pytest.raises(UserError, match=rf"teacher\.url: http://127(.|\n)*{refusal}"):
        train(from_server(server))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scored: scored[1:], "tokens are scored, of "),
        (lambda scored: [None, *({"999": {"logprob": -1.0}} for _ in scored[1:])], "KeyError"),
        (lambda scored: [None, *({t: {"logprob": -9999.0} for t in entry} for entry in scored[1:])], "not finite"),
        (lambda scored: None, "another form: TypeError"),
    ],
)
def test_an_answer_that_does_not_score_the_response_ends_the_run(
    change: Callable[[Any], Any], said: str, server: TeacherServer
) -> None:
    def changed(path: str, body: Any) -> Any:
        if path != "/v1/completions":
            return None
        scored = server.answer(path, body)["choices"][0]["prompt_logprobs"]
        return {"choices": [{"prompt_logprobs": change(scored)}]}

    server.instead = changed
    with pytest.raises(RunError, match=said):
        train(from_server(server, "steps=1"))


def test_of_several_contexts_only_what_the_policy_wrote_is_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of its own is asked for by itself; what stands in it before the policy's turn, or after it, is read."""
    asked = list[list[int]]()

    async def answers(teacher: TeacherConfig, requests: Any) -> list[Any]:
        asked.extend(request.body["prompt"] for request in requests)
        scored = [[None, *({str(own): {"logprob": -own / 100}} for own in ids[1:])] for ids in asked]
        return [{"choices": [{"prompt_logprobs": row}]} for row in scored]

    monkeypatch.setattr(served_teacher, "_answers", answers)
    mask = torch.tensor([True, False, True, False, False, True])
    sample = sample_of(query_of([1, 2]), [3, 4, 5, 6, 7, 8], loss_mask=mask, starts=(3,))
    batch = scored([Group(samples=(sample, sample_of(query_of([1, 2]), [9])))], [1.0, None])
    teacher = TeacherConfig(url="http://a:1", model="m")
    first, unscored = served_teacher.with_served_teacher(batch, teacher, temperature=1.0).samples
    assert asked == [[1, 2, 3, 4, 5], [6, 7, 8]]
    assert first.teacher_logprobs is not None and unscored.teacher_logprobs is None
    assert first.teacher_logprobs.tolist() == pytest.approx([-0.03, -0.05, -0.08])
    with pytest.raises(UserError, match=r"a hook has set the temperature to 0\.5"):
        served_teacher.with_served_teacher(batch, teacher, temperature=0.5)
