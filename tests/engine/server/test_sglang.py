"""SGLang's requests and answers, held to SGLang's own classes; no server of it runs here.

`sglang_classes.json` is what extract_sglang_classes.py found in the source of SGLang 0.5.23: fields, types, defaults.
"""

import base64
import json
import re
import subprocess
import sys
import typing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from gspo.engine.engine import Prompt, Sampling
from gspo.engine.server.api import BadAnswerError, Request, SampleRequest
from gspo.engine.server.sglang import SglangApi
from gspo.recipe.sections import ServerConfig

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("sglang_classes.json").read_text())
STRICT = ConfigDict(extra="forbid", strict=True)
SAMPLING = Sampling(temperature=0.7, stop_ids=(2, 9))
TWO = SampleRequest(
    prompts=[Prompt(ids=(34, 5), key=key, max_new_tokens=3) for key in (7, 8)],
    sampling=SAMPLING,
    versions={"run-3": 3, "run-2": 2},
)
ONE = replace(TWO, prompts=TWO.prompts[:1])
ENDLESS = replace(ONE, sampling=replace(SAMPLING, stop_ids=()))
WITH_EXPERTS = replace(ONE, experts=torch.uint8)


class Names(dict[str, Any]):
    """What annotations mean; a class that no request of gspo's fills is anything."""

    def __missing__(self, name: str) -> Any:
        alias = RECORDED["aliases"].get(name)
        return eval(alias, {}, self) if alias else getattr(typing, name, Any)


TYPES = Names({"int": int, "str": str, "bool": bool, "float": float})


def class_of(name: str) -> type[BaseModel]:
    """A class of SGLang's, as strict as JSON allows, that takes no field which SGLang would ignore."""
    fields: dict[str, Any] = {}
    for field, text in RECORDED["classes"][name].items():
        annotation, _, default = text.partition(" = ")
        fields[field] = (eval(annotation, {}, TYPES), None if default else ...)
    return create_model(name, __config__=STRICT, **fields)


def api(experts: tuple[int, int] | None = None, **options: Any) -> SglangApi:
    """Its side of the protocol, for a model of so many layers and experts a token."""
    return SglangApi(ServerConfig(options=options), max_rows=64, experts=experts)


def response(ids: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    """A response as the recorded names build it; changes are those of its meta_info."""
    ids = [8, 2] if ids is None else ids
    meta = {
        "id": "a1",
        "finish_reason": {"type": "stop", "matched": ids[-1]} if ids else None,
        "prompt_tokens": 2,
        "completion_tokens": len(ids),
        "weight_version": "run-3",
        "weight_versions": [{"version": "run-3", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-0.5 - place, token, None] for place, token in enumerate(ids)],
        **changes,
    }
    return {"output_ids": ids, "meta_info": meta}


ROUTED = "AQAAAAMAAAAAAAAAAgAAAAMAAAABAAAA"  # int32, in C order, of 3 tokens, 1 layer, 2 experts a token
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_req_input_len": 42,
    "enable_return_routed_experts": True,
    "kv_cache_dtype": "auto",
    "quantization": None,
    "speculative_algorithm": None,
    "enable_deterministic_inference": False,
    "rl_on_policy_target": None,
    "allow_auto_truncate": False,
    "preferred_sampling_params": None,
}


@pytest.fixture
def saved(tmp_path: Path) -> list[str]:
    """Weights in a directory of their own."""
    paths = [tmp_path / f"model-{number:05d}.safetensors" for number in range(3)]
    for path in paths:
        path.touch()
    return [str(path) for path in paths]


def all_requests(saved: list[str]) -> list[Request]:
    """Every request that there is, of each form."""
    asked = (TWO, ONE, ENDLESS, replace(TWO, experts=torch.uint8))
    own = api()
    return [Request(path=own.about_path), *(own.sample(each) for each in asked), *own.publish(saved, "run-3")]


def test_every_request_is_one_of_sglangs_own_classes(saved: list[str]) -> None:
    for request in all_requests(saved):
        (route,) = (route for route in RECORDED["routes"] if f"'{request.path}'" in route)
        takes = re.search(r"obj: (?:Annotated\[)?(\w+)", RECORDED["routes"][route])
        assert (request.body is None) == (takes is None)
        assert route.startswith("app.get(") if request.body is None else "post" in route.lower()
        if takes:
            body = json.loads(json.dumps(request.body))
            class_of(takes[1]).model_validate(body)
            if "sampling_params" in body:
                class_of("SamplingParams").model_validate(body["sampling_params"])


def test_what_sglang_would_ignore_or_refuse_is_seen_here() -> None:
    body = api().sample(TWO).body
    parameters = body["sampling_params"]
    for name, wrong in {
        "GenerateReqInput": {**body, "return_logprobs": True},
        "UpdateWeightFromDiskReqInput": {"model_path": "/weights", "weight_version": 3},
        "PauseGenerationReqInput": {"mode": "keep"},
        "SamplingParams": {**parameters, "max_tokens": 3},
    }.items():
        with pytest.raises(ValidationError):
            class_of(name).model_validate(wrong)


def test_a_group_is_one_request_for_the_distribution_at_the_temperature() -> None:
    body = api().sample(TWO).body
    assert (body["input_ids"], body["return_logprob"], body["cache_salt"]) == ([34, 5], True, "run-3")
    parameters = body["sampling_params"]
    assert (parameters["n"], parameters["max_new_tokens"], parameters["temperature"]) == (2, 3, 0.7)
    assert (parameters["top_p"], parameters["top_k"], parameters["min_p"]) == (1.0, -1, 0.0)


@pytest.mark.parametrize("shaping", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"biases": {5: 2.0}}])
def test_a_shaped_distribution_is_never_asked_for(shaping: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="before top_p"):
        api().sample(replace(TWO, sampling=replace(SAMPLING, **shaping)))


def test_responses_end_at_the_policys_tokens_or_at_none() -> None:
    ends = api().sample(TWO).body["sampling_params"]
    assert (ends["stop_token_ids"], ends["ignore_eos"]) == ([2, 9], False)  # true, it would ignore both
    assert api().sample(ENDLESS).body["sampling_params"]["ignore_eos"]
    command = api().command(
        model=Path("/model"), address="127.0.0.1", port=1, max_length=9, dtype="float32", kind="cuda"
    )
    assert json.loads(command[command.index("--json-model-override-args") + 1]) == {"eos_token_id": None}


class Watched(dict[str, Any]):
    """A JSON object that remembers which of its keys were read."""

    read: typing.ClassVar[set[str]] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The same."""
        self.read.add(key)
        return super().get(key, default)


def watched(value: Any) -> Any:
    """The same JSON, of watched objects."""
    return json.loads(json.dumps(value), object_hook=Watched)


def test_every_key_that_is_read_is_one_that_sglang_writes() -> None:
    Watched.read.clear()
    experts = api((1, 2))
    experts.read(watched(response(routed_experts=ROUTED)), WITH_EXPERTS)
    aborted = watched(response(finish_reason={"type": "abort", "message": "Aborted"}))
    with pytest.raises(BadAnswerError):
        experts.read(aborted, WITH_EXPERTS)
    classes, finishes = RECORDED["classes"], RECORDED["finish_reasons"].values()
    written = {key for name in ("GenerateResponse", "GenerateMetaInfo", "WeightVersionSpan") for key in classes[name]}
    assert Watched.read <= written.union(RECORDED["meta_info"], *finishes)
    assert {"output_ids", "output_token_logprobs", "weight_version", "routed_experts", "matched"} <= Watched.read
    Watched.read.clear()
    experts.check(watched(INFO), max_length=40)
    assert Watched.read <= {*RECORDED["options"], *RECORDED["server_info"]}
    assert Watched.read == set(INFO)


def test_answers_of_the_tests_are_sglangs() -> None:
    answer = response()
    class_of("GenerateResponse").model_validate({**answer, "meta_info": None})
    class_of("GenerateMetaInfo").model_validate(answer["meta_info"])
    assert list(RECORDED["classes"]["LogprobEntry"]) == ["logprob", "token_id", "text"]  # the order in the array
    assert set(answer["meta_info"]["finish_reason"]) <= set(RECORDED["finish_reasons"]["FINISH_MATCHED_TOKEN"])


def test_a_group_is_read_in_its_order_whatever_its_size() -> None:
    cut = response([8, 8, 7], finish_reason={"type": "length", "length": 3})
    first, second = api().read([response([5, 9]), cut], TWO)
    assert (first.token_ids.tolist(), first.logprobs.tolist(), first.finish_reason) == ([5, 9], [-0.5, -1.5], "stop")
    assert (second.token_ids.tolist(), second.finish_reason, second.versions) == ([8, 8, 7], "length", ((3, 3),))
    assert [own.token_ids.tolist() for own in api().read(response(), ONE)] == [[8, 2]]  # one response is no list
    assert first.experts is first.full_logprobs is None


def test_a_response_of_two_weights_says_so() -> None:
    spans = [{"version": "run-2", "start": 0, "end": 1}, {"version": "run-3", "start": 1, "end": 2}]
    assert api().read(response(weight_versions=spans), ONE)[0].versions == ((2, 1), (3, 1))
    without = response()
    del without["meta_info"]["weight_versions"]  # as SGLang 0.5.16 answers
    assert api().read(without, ONE)[0].versions == ((3, 2),)


NAN = {"type": "stop", "matched": "NaN happened"}  # the token, out of the vocabulary, is overwritten by an end token
SHORT, LONG = {"type": "length", "length": 2}, {"type": "length", "length": 3}
WAITED: dict[str, Any] = {
    "id": "a1",
    "finish_reason": {"type": "abort", "message": "in queue"},
    "weight_version": "run-3",
}
WAITED |= {"output_token_logprobs": [], "completion_tokens": 0, "e2e_latency": 0.1}  # it has no prompt_tokens
BAD: dict[str, Any] = {
    "aborted": response(finish_reason={"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}),
    "aborted while it waited": {"text": "", "output_ids": [], "meta_info": WAITED},
    "NaN": response(finish_reason=NAN),
    "NaN without end tokens": response([8, 70_000], finish_reason=NAN),
    "another end token": response([8, 4]),
    "an end token that ends nothing": response([8, 5, 2], finish_reason=LONG),
    "ended by another token than the last": response(finish_reason={"type": "stop", "matched": 9}),
    "cut off too early": response([8, 5], finish_reason=SHORT),
    "no reason": response(finish_reason=None),
    "another reason": response(finish_reason={"type": "done"}),
    "no tokens": response([], finish_reason=SHORT),
    "a log-likelihood for another token": response(output_token_logprobs=[[-0.1, 8, None], [-0.1, 9, None]]),
    "a log-likelihood too few": response(output_token_logprobs=[[-0.1, 8, None]]),
    "no log-likelihoods": response(output_token_logprobs=None),
    "a log-likelihood that was NaN": response(output_token_logprobs=[[-0.1, 8, None], [None, 2, None]]),
    "a log-likelihood that was -inf": response(output_token_logprobs=[[-0.1, 8, None], [-3.4e38, 2, None]]),
    "a likelihood above 1": response(output_token_logprobs=[[-0.1, 8, None], [0.1, 2, None]]),
    "a shorter prompt": response(prompt_tokens=1),
    "no version": response(weight_version=None, weight_versions=None),
    "weights of another run": response(weight_versions=[{"version": "other-3", "start": 0, "end": 2}]),
    "two responses": [response(), response()],
    "none": [],
    "no JSON of SGLang's": {"choices": []},
    "null": None,
    "text": "out of memory",
    "a list of lists": [[]],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_refused(name: str) -> None:
    with pytest.raises(BadAnswerError):
        api().read(BAD[name], ONE)


def test_a_refusal_says_what_is_wrong() -> None:
    for name, words in {
        "NaN": "NaN happened",
        "aborted": "'Aborted'",
        "aborted while it waited": "in queue",
        "another end token": r"ends at \[2, 9\]",
        "weights of another run": "sampled with the weights other-3, not run-3, run-2",
    }.items():
        with pytest.raises(BadAnswerError, match=words):
            api().read(BAD[name], ONE)


def test_experts_are_of_each_token_but_the_last() -> None:
    found = api((1, 2)).read(response(routed_experts=ROUTED), WITH_EXPERTS)[0].experts
    assert found is not None and found.row.dtype == torch.uint8
    # Of 2 + 2 tokens, 1 layer, 2 experts a token; the prompt's last token predicts the response's first.
    assert (found.prefix.tolist(), found.row.tolist()) == ([[[1, 3]]], [[[0, 2]], [[3, 1]]])
    table = np.arange(24, dtype=np.int32).reshape(3, 4, 2)
    sent = base64.b64encode(table.tobytes()).decode()
    found = api((4, 2)).read(response(routed_experts=sent), WITH_EXPERTS)[0].experts
    assert found is not None and np.array_equal(torch.cat((found.prefix, found.row)), table)


@pytest.mark.parametrize("sent", [ROUTED[:16], ROUTED[:-1], "", None, [1, 2]])
def test_experts_of_another_number_of_tokens_are_refused(sent: Any) -> None:
    with pytest.raises(BadAnswerError):
        api((1, 2)).read(response(routed_experts=sent), WITH_EXPERTS)


def test_missing_experts_are_refused() -> None:  # SGLang leaves them out in silence without its flag
    with pytest.raises(BadAnswerError, match="routed_experts"):
        api((1, 2)).read(response(), WITH_EXPERTS)


def test_the_command_line_is_of_sglangs_options() -> None:
    command = api((1, 2)).command(
        model=Path("/model"), address="127.0.0.1", port=4321, max_length=40, dtype="bfloat16", kind="cuda"
    )
    arguments = " ".join(command[3:])
    given = dict(re.findall(r"--([\w-]+)(?: (?!--)(.*?))?(?= --|$)", arguments))
    options = RECORDED["options"]
    for flag, text in given.items():
        kind = options[flag.replace("-", "_")].partition(" = ")[0]
        assert (text == "") == (kind == "bool")  # a truth value is a flag without a value
        assert "int" not in kind or text.isdigit()
    assert (given["host"], given["port"], given["dtype"], given["load-format"]) == (
        "127.0.0.1",
        "4321",
        "bfloat16",
        "dummy",
    )
    assert {"skip-tokenizer-init", "enable-return-routed-experts"} <= set(given)
    assert int(given["context-length"]) == 48  # SGLang keeps up to 8 tokens of it
    assert given["log-level"] == "warning"  # at level info it logs its key


def test_further_options_come_last_and_false_ones_are_left_out() -> None:
    own = api(mem_fraction_static=0.5, disable_radix_cache=False, tp_size=2, cuda_graph_bs=[1, 2], dtype="float16")
    command = own.command(model=Path("/model"), address="127.0.0.1", port=1, max_length=9, dtype="float32", kind="cuda")
    text = " ".join(command)
    assert "--mem-fraction-static 0.5" in text and "--tp-size 2" in text and "--cuda-graph-bs 1 2" in text
    assert "--dtype float16" in text and "float32" not in text
    assert "radix" not in text and "--enable-return-routed-experts" not in text


LAUNCHED = """
import json, multiprocessing, sys

def child(queue):
    queue.put(__name__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")  # as SGLang starts its workers
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(json.dumps([sys.argv[1:], queue.get(timeout=60)]))
    process.join()
"""


def test_the_key_reaches_sglang_and_stands_in_no_command_line(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(LAUNCHED)
    command = api().command(
        model=Path("/model"), address="127.0.0.1", port=1, max_length=9, dtype="float32", kind="cuda"
    )
    environment = {**api().environment("secret"), "PYTHONPATH": str(tmp_path)}
    assert command[0] == sys.executable and "secret" not in " ".join(command)
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    arguments, name = json.loads(said)
    assert arguments == [*command[3:], "--api-key", "secret"]
    assert "api_key" in RECORDED["options"]
    assert name == "__mp_main__"  # as with python -m


def test_a_server_as_it_must_be_says_what_it_is() -> None:
    assert api((1, 2)).check(INFO, max_length=40) == {"engine version": "0.5.23", "engine dtype": "bfloat16"}
    assert api().check({**INFO, "enable_return_routed_experts": False}, max_length=42)
    assert api().check({**INFO, "kv_cache_dtype": "bfloat16"}, max_length=42)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "auto"}, "dtype that is not auto"),
        ({"skip_tokenizer_init": False}, "skip_tokenizer_init"),
        ({"max_req_input_len": 39}, "context_length 48"),
        ({"enable_return_routed_experts": False}, "enable_return_routed_experts"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype"),
        ({"quantization": "fp8"}, "no quantization"),
        ({"speculative_algorithm": "EAGLE"}, "no speculative_algorithm"),
        ({"enable_deterministic_inference": True}, "no enable_deterministic_inference"),
        ({"rl_on_policy_target": "fsdp"}, "no rl_on_policy_target"),
        ({"allow_auto_truncate": True}, "no allow_auto_truncate"),
        ({"preferred_sampling_params": {"top_k": 5}}, "no preferred_sampling_params"),
        ({"max_req_input_len": None}, "not that of SGLang"),
    ],
)
def test_a_server_that_would_compute_something_else_is_refused(changes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        api((1, 2)).check({**INFO, **changes}, max_length=40)


@pytest.mark.parametrize("about", [{}, {"vllm_config": {}}, [], None, "ok"])
def test_a_server_of_another_kind_is_refused(about: Any) -> None:
    with pytest.raises(ValueError, match="not that of SGLang"):
        api().check(about, max_length=40)


def test_weights_are_those_of_a_directory_and_named(saved: list[str]) -> None:
    pause, update, go_on = api().publish(saved, "run-3")
    assert (pause.path, go_on.path) == ("/pause_generation", "/continue_generation")
    assert update.body["model_path"] == str(Path(saved[0]).parent)
    assert update.body["weight_version"] == "run-3"
    assert update.body["load_format"] == "safetensors"  # null is the server's own: dummy
    assert update.body["flush_cache"] and pause.body["mode"] == "abort"


@pytest.mark.parametrize(("at_publish", "mode"), [("recompute", "retract"), ("keep", "in_place")])
def test_responses_under_way_are_read_again_with_new_weights_or_go_on_with_what_was_computed(
    at_publish: Any, mode: str, saved: list[str]
) -> None:
    pause, update, _ = SglangApi(ServerConfig(), max_rows=8, experts=None, at_publish=at_publish).publish(
        saved, "run-3"
    )
    assert pause.body["mode"] == mode and not update.body["abort_all_requests"]
    assert update.body["flush_cache"] == (at_publish == "recompute")


def test_weights_in_a_directory_with_others_are_not_published(saved: list[str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        api().publish(saved[1:], "run-3")  # what a run that was killed has left there
    with pytest.raises(AssertionError):
        api().publish([*saved, str(tmp_path / "elsewhere" / "model.safetensors")], "run-3")
