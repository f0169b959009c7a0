"""vLLM's requests and answers, without a server: one answer as vLLM 0.32 gave it, and what must not pass for one."""

import base64
import copy
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.format import write_array

from gspo.engine.engine import Prompt, Sampling
from gspo.engine.server.api import BadAnswerError, SampleRequest
from gspo.engine.server.vllm import VllmApi
from gspo.recipe.sections import ServerConfig

# The head of the .npy bytes of an array [4, 2, 1] of uint8, as numpy 2 writes it, then its eight experts.
ROUTED = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (4, 2, 1), }".ljust(127) + b"\n"
ROUTED += bytes([0, 3, 1, 1, 2, 0, 0, 3])


def content(ids: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
    """As the server writes it: the sampled token is its own only alternative."""
    tokens = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in zip(ids, logprobs, strict=True)]
    return [{**token, "top_logprobs": [token]} for token in tokens]


def choice(index: int, ids: list[int], logprobs: list[float], reason: str) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": reason,
        "stop_reason": ids[-1] if reason == "stop" else None,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "a1-7", "start": 0, "end": len(ids)}],
        "logprobs": {"content": content(ids, logprobs)},
    }


ANSWER = {
    "request_id": "generate-tokens-1",
    "model": "policy",
    "output_mode": "tokens",
    "choices": [choice(1, [9, 8, 9], [-0.5, -1.5, -0.25], "length"), choice(0, [5, 2], [-1.25, -0.75], "stop")],
}
TWO = SampleRequest(
    prompts=[Prompt(ids=(7, 6, 5), key=key, max_new_tokens=3) for key in (11, 12)],
    sampling=Sampling(top_k=5, biases={4: -2.0}, stop_ids=(2,)),
    versions={"a1-7": 7, "a1-8": 8},
)


@pytest.fixture
def api() -> VllmApi:
    return VllmApi(ServerConfig(), max_rows=16, returns_experts=False)


def test_the_responses_come_in_the_order_of_their_numbers(api: VllmApi) -> None:
    first, second = api.read(ANSWER, TWO)
    assert (first.token_ids.tolist(), first.logprobs.tolist(), first.finish_reason) == ([5, 2], [-1.25, -0.75], "stop")
    assert (second.token_ids.tolist(), second.finish_reason, second.versions) == ([9, 8, 9], "length", ((7, 3),))


def test_the_likelihood_at_the_temperature_is_unknown_where_tokens_were_drawn_from_another_distribution(
    api: VllmApi,
) -> None:
    (first, _), (own, _) = api.read(ANSWER, TWO), api.read(ANSWER, replace(TWO, sampling=Sampling(stop_ids=(2,))))
    assert first.full_logprobs is not None and first.full_logprobs.isnan().tolist() == [True, True]
    assert own.full_logprobs is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("choices", 1), None, "1 completions where 2"),
        (("choices", 0, "token_ids"), [], "0 tokens"),
        (("choices", 0, "token_ids"), [9, 8, 7], "not of the same"),
        (("choices", 0, "logprobs"), None, "another form"),
        (("choices", 0, "logprobs", "content", 1), None, "log-likelihoods of 2"),
        (("choices", 0, "logprobs", "content", 1, "logprob"), -9999.0, "not finite"),
        (("choices", 0, "logprobs", "content", 1, "logprob"), float("nan"), "not finite"),
        (("choices", 0, "logprobs", "content", 1, "logprob"), 0.5, "not finite"),
        (("choices", 0, "finish_reason"), "abort", "finish_reason abort"),
        (("choices", 0, "finish_reason"), "stop", "finish_reason stop after token 9"),
        (("choices", 1, "finish_reason"), "length", "finish_reason length after token 2"),
        (("choices", 0, "weight_versions"), None, "another form"),
        (("choices", 0, "weight_versions", 0, "version"), "b2-7", "sampled with the weights b2-7, not a1-7, a1-8"),
        (("choices",), None, "another form"),
    ],
)
def test_what_contradicts_itself_or_the_request_is_no_answer(
    path: tuple[Any, ...], value: Any, words: str, api: VllmApi
) -> None:
    answer: Any = copy.deepcopy(ANSWER)
    *way, last = path
    place = answer
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(BadAnswerError, match=words):
        api.read(answer, TWO)


def test_a_response_that_the_servers_length_has_cut_short_is_no_answer(api: VllmApi) -> None:
    longer = replace(TWO, prompts=[replace(prompt, max_new_tokens=4) for prompt in TWO.prompts])
    with pytest.raises(BadAnswerError, match="max_model_len"):
        api.read(ANSWER, longer)


def test_tokens_of_two_versions_are_spans_that_have_to_be_all_of_the_response(api: VllmApi) -> None:
    answer: Any = copy.deepcopy(ANSWER)
    spans = [{"version": "a1-7", "start": 0, "end": 2}, {"version": "a1-8", "start": 2, "end": 3}]
    answer["choices"][0]["weight_versions"] = spans
    assert [own.versions for own in api.read(answer, TWO)] == [((7, 2),), ((7, 2), (8, 1))]
    for wrong in (spans[:1], spans[1:], [spans[0], {**spans[1], "start": 1}], []):
        answer["choices"][0]["weight_versions"] = wrong
        with pytest.raises(BadAnswerError, match="the weights of 3 tokens"):
            api.read(answer, TWO)


def test_one_request_asks_for_the_group_with_all_that_shapes_its_distribution(api: VllmApi) -> None:
    request = api.sample(TWO)
    parameters = request.body["sampling_params"]
    assert (request.body["token_ids"], request.body["cache_salt"]) == ([7, 6, 5], "a1-7")
    assert (parameters["n"], parameters["max_tokens"], parameters["seed"]) == (2, 3, 11)
    assert (parameters["top_k"], parameters["logit_bias"]) == (5, {"4": -2.0})
    assert (parameters["stop_token_ids"], parameters["ignore_eos"]) == ([2], True)


def test_routed_experts_are_those_of_each_token_but_the_last(api: VllmApi) -> None:
    expected = np.array([0, 3, 1, 1, 2, 0, 0, 3], dtype=np.uint8).reshape(4, 2, 1)
    written = io.BytesIO()
    write_array(written, expected, allow_pickle=False)
    assert written.getvalue() == ROUTED  # what numpy writes now is what was written down here
    answer: Any = copy.deepcopy(ANSWER)
    answer["choices"] = [choice(0, [5, 2], [-1.25, -0.75], "stop")]
    answer["choices"][0]["routed_experts"] = base64.b64encode(ROUTED).decode()
    (completion,) = api.read(answer, replace(TWO, prompts=TWO.prompts[:1], experts=torch.uint8))
    experts = completion.experts
    assert experts is not None and experts.row.dtype == torch.uint8
    # Of three prompt tokens the last predicts the response's first token; the response's last is never read.
    assert experts.prefix.tolist() == expected[:2].tolist() and experts.row.tolist() == expected[2:].tolist()


def test_experts_of_another_number_of_tokens_are_no_answer(api: VllmApi) -> None:
    answer: Any = copy.deepcopy(ANSWER)
    for own in answer["choices"]:  # of four tokens, as the first response has read, but not the second
        own["routed_experts"] = base64.b64encode(ROUTED).decode()
    with pytest.raises(BadAnswerError, match="experts of 4 tokens"):
        api.read(answer, replace(TWO, experts=torch.uint8))
    with pytest.raises(BadAnswerError, match="another form"):
        api.read(ANSWER, replace(TWO, experts=torch.uint8))
