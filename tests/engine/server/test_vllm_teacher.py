"""A real vLLM server as a teacher: its scores of responses are the model's own, and its tokens are proven."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.server.real import vllm_python
from tests.samples import query_of, sample_of
from tests.small_model import save_small_model
from transformers import AutoTokenizer

from gspo import loop
from gspo.engine.server.api import NoAnswerError, Request
from gspo.engine.server.hosts import ThisHost
from gspo.engine.server.server import ask, new_client
from gspo.engine.server.vllm import _ON_CPU, _ONE_PROCESS, VllmApi, _as_option
from gspo.errors import UserError
from gspo.learner.served_teacher import check_server, with_served_teacher
from gspo.model.packing import TokenSequence
from gspo.model.policy import load_policy, response_likelihood
from gspo.recipe.sections import ModelConfig, ServerConfig, TeacherConfig
from gspo.types import Batch, Group, Score

TOLERANCE = 1e-5  # nats a token, in float32
START_SECONDS = 300.0
KEY_VARIABLE = "TEACHERS_KEY"


async def _ready(url: str) -> None:
    async with new_client() as client:
        for _ in range(int(START_SECONDS)):
            try:
                await ask(client, url, Request(path="/health"), key="", seconds=5.0)
                return
            except NoAnswerError:
                await loop.asyncio.sleep(1.0)
    raise TimeoutError(url)


@pytest.fixture(scope="module")
def teacher(home: Path) -> Iterator[TeacherConfig]:
    """A server that has the model in `home`, with a key."""
    torch.manual_seed(1)
    save_small_model(home / "teacher", head_dim=32, initializer_range=0.3, max_position_embeddings=64)
    host = ThisHost()
    port = host.free_port()
    options = {"model": home / "teacher", "served_model_name": "big", "port": port, "host": host.address}
    options |= {"dtype": "float32", "api_key": "secret", **_ON_CPU, **_ONE_PROCESS}
    arguments = [text for name, value in options.items() for text in _as_option(name, value)]
    command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", *arguments]
    environment = VllmApi(ServerConfig(), max_rows=1, returns_experts=False).environment("")
    process = host.start(command, environment, home / "teacher.log")
    url = f"http://{host.address}:{port}"
    try:
        loop.run(_ready(url))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_VARIABLE, "secret")
            yield TeacherConfig(url=url, model="big", key_variable=KEY_VARIABLE)
    finally:
        process.end()


def test_the_scores_of_the_server_are_those_of_the_model(teacher: TeacherConfig, home: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(home / "teacher")
    check_server(teacher, tokenizer, longest=63)
    policy = load_policy(ModelConfig(path=str(home / "teacher"), device="cpu"), tokenizer, seed=0)
    query, score = query_of([40, 41, 42]), Score(reward=1.0, parts={})
    mask = torch.tensor([True, True, False, False, False, True, True])
    samples = [
        sample_of(query, [50, 51, 0], score=score),
        sample_of(replace(query, id="test:2", teacher_ids=(43,) * 9), [7, *range(60, 80)], score=score),
        sample_of(query, [1, 2, 3, 4, 5, 6, 7], loss_mask=mask, score=score),  # with what a tool said
        sample_of(query, [1, 2, 3, 4, 5, 6, 7], loss_mask=mask, starts=(2,), score=score),  # of two contexts
    ]
    batch = Batch(groups=(Group(samples=tuple(samples)),))
    scored = with_served_teacher(batch, teacher, temperature=1.0)
    sequences = [
        TokenSequence(
            prompt_ids=own.query.teacher_ids or own.query.prompt_ids,
            response_ids=own.token_ids,
            loss_mask=own.loss_mask,
            starts=own.starts,
        )
        for own in samples
    ]
    own = response_likelihood(policy, sequences, temperature=1.0).logprobs
    served = torch.cat([row for sample in scored.samples if (row := sample.teacher_logprobs) is not None])
    assert own.min() < -5  # not those of a model that finds all tokens alike
    torch.testing.assert_close(served, own.detach().cpu(), atol=TOLERANCE, rtol=0)


def test_another_vocabulary_a_shorter_context_and_a_wrong_key_are_refused(
    teacher: TeacherConfig, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_model(home / "other", special=["<|more|>"])
    tokenizer = AutoTokenizer.from_pretrained(home / "teacher")
    with pytest.raises(UserError, match="its tokens are not the policy's"):
        check_server(teacher, AutoTokenizer.from_pretrained(home / "other"), longest=10)
    with pytest.raises(UserError, match="it reads 64 tokens"):
        check_server(teacher, tokenizer, longest=64)
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(UserError, match=r"does not prove.*status 401"):
        check_server(teacher, tokenizer, longest=10)
