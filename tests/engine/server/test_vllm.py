"""A real vLLM server of a dense model: what it samples, the weights that it is given, and every way in which it fails.

One server for all of them, for its start takes longer than all that is asked of it.
"""

import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.server import real
from tests.engine.server.fault_proxy import (
    Exchange,
    Fault,
    Proxy,
    answering,
    asking,
    changing,
    drop,
    hang,
    truncate,
)
from tests.engine.server.real import SHAPE, RunningServer, engine_of, running_server
from tests.needs import needs

from gspo import loop
from gspo.engine.engine import Engine
from gspo.engine.server import server as one_server
from gspo.engine.server.engine import ServerEngine
from gspo.engine.server.fleet import KEY_VARIABLE
from gspo.engine.server.hosts import free_port
from gspo.errors import DivergedError, RunError, Stopped, UserError
from gspo.interrupt import Interrupt
from gspo.loop import all_of
from gspo.model.lora import WEIGHTS, adapter_of, merged_tensors, moved_adapter, with_adapter
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, load_policy, response_likelihood
from gspo.recipe.sections import LoraConfig, ModelConfig, RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Group, Query, Sample

NewPolicy = Callable[..., Policy]
SETTINGS = RolloutConfig(max_new_tokens=12, group_size=3)
KEY = SamplingKey(seed=0, step=1)
VERSIONS = count()
PATIENCE = 2.0  # seconds
ATTEMPTS = 10  # at a response that spans two versions: the server of a busy machine may end all before new weights come
TOLERANCE = 1e-5  # nats a token, in float32


@pytest.fixture(scope="module")
def server(new_policy: NewPolicy, home: Path) -> Iterator[RunningServer]:
    with running_server(new_policy(**SHAPE), home) as server:
        yield server


@pytest.fixture(scope="module")
def one_proxy(server: RunningServer) -> Iterator[Proxy]:
    proxy = Proxy(server.url)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(one_proxy: Proxy) -> Iterator[Proxy]:
    """The same for all tests, with nothing of an earlier one."""
    one_proxy.requests.clear()
    yield one_proxy
    one_proxy.rules.clear()


@pytest.fixture
def policy(new_policy: NewPolicy) -> Policy:
    return new_policy(**SHAPE)


@pytest.fixture
def new_sampler(policy: Policy, proxy: Proxy, key: str, tmp_path: Path) -> Iterator[Callable[..., Sampler]]:
    """Of an engine whose server is behind the proxy; it has the policy's weights as version 0."""
    engines: list[ServerEngine] = []

    def build(**vllm: Any) -> Sampler:
        engines.append(engine_of(policy, tmp_path, **{"urls": (proxy.url,), **vllm}))
        sampler = Sampler(engines[-1], policy)
        sampler.publish(0)
        return sampler

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def shared(one_proxy: Proxy, new_policy: NewPolicy, home: Path) -> Iterator[Sampler]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(KEY_VARIABLE, real.KEY)
        policy = new_policy(**SHAPE)
        engine = engine_of(policy, home, urls=(one_proxy.url,))
    yield Sampler(engine, policy)
    engine.close()


@pytest.fixture
def sampler(shared: Sampler, proxy: Proxy) -> Sampler:
    """One for all tests that change nothing of its engine and its policy; nothing is measured yet."""
    assert isinstance(shared.engine, ServerEngine)
    fleet = shared.engine._fleet
    if proxy.label not in fleet.versions(fleet.version):  # the server has had other weights since
        shared.publish(next(VERSIONS))
    proxy.requests.clear()
    shared.engine.take_metrics()
    return shared


@pytest.fixture
def queries(query_of: Callable[..., Query]) -> list[Query]:
    return some_queries(query_of)


def some_queries(query_of: Callable[..., Query]) -> list[Query]:
    return [query_of([4, 5, 6], 0), query_of([7], 1), query_of([3, 9, 8, 4, 5], 2)]


def tokens(groups: Sequence[Group]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def logprobs(groups: Sequence[Group]) -> torch.Tensor:
    return torch.cat([sample.sampler_logprobs for group in groups for sample in group.samples])


def likelihoods(policy: Policy, groups: Sequence[Group], temperature: float = 1.0) -> torch.Tensor:
    """The policy's own, of the sampled tokens."""
    samples = [sample for group in groups for sample in group.samples]
    sequences = [TokenSequence(prompt_ids=own.query.prompt_ids, response_ids=own.token_ids) for own in samples]
    with torch.no_grad():
        return response_likelihood(policy, sequences, temperature=temperature).logprobs


def change(policy: Policy, factor: float = 1.3) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(factor)


# What is sampled


def test_groups_come_in_the_order_of_the_queries_with_the_policys_own_likelihoods(
    new_sampler: Callable[..., Sampler], policy: Policy, queries: list[Query], proxy: Proxy
) -> None:
    sampler = new_sampler()
    shown: list[tuple[int, int, str]] = []
    groups = sampler.sample(queries, SETTINGS, KEY, show_progress=lambda *count: shown.append(count))
    assert isinstance(sampler.engine, Engine)
    assert [group.query for group in groups] == queries and [len(group.samples) for group in groups] == [3] * 3
    assert {sample.versions for group in groups for sample in group.samples} <= {((0, n),) for n in range(1, 13)}
    assert (logprobs(groups) - likelihoods(policy, groups)).abs().max() < TOLERANCE
    assert sorted(proxy.groups()) == sorted(query.prompt_ids for query in queries)  # each prompt is read once
    assert sampler.sample([], SETTINGS, KEY) == ()
    sampler.engine.close()
    sampler.engine.close()


SHAPED: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 5},
    {"top_k": 8, "top_p": 0.8, "temperature": 1.5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"id:5": -100.0, "id:9": 2.0}},
    {"logit_bias": {"id:9": 4.0}, "repetition_penalty": 0.7, "top_p": 0.9},
]


@torch.no_grad()
def log_q(policy: Policy, sample: Sample, settings: RolloutConfig) -> torch.Tensor:
    """Of the sampled tokens, by the equations of docs/reference/recipe.md: bias, penalty, temperature, cuts."""
    prompt, response = list(sample.query.prompt_ids), sample.token_ids.tolist()
    table = policy.model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].double()
    found = []
    for place, token in enumerate(response, start=len(prompt)):
        logits = table[place - 1].clone()
        for name, bias in settings.logit_bias.items():
            logits[int(name.removeprefix("id:"))] += bias
        for seen in {*prompt, *response[: place - len(prompt)]}:
            penalty = settings.repetition_penalty
            logits[seen] *= penalty if logits[seen] < 0 else 1 / penalty
        p = (logits / settings.temperature).softmax(-1)
        if settings.top_k:
            p[p < p.topk(settings.top_k).values[-1]] = 0
            p /= p.sum()
        ordered, order = p.sort(descending=True)
        p[order[ordered.cumsum(-1) - ordered >= settings.top_p]] = 0
        p[p < settings.min_p * p.max()] = 0
        found.append((p[token] / p.sum()).log())
    return torch.stack(found).float()


@pytest.mark.parametrize("changes", SHAPED, ids=str)
def test_log_likelihoods_are_of_what_the_tokens_were_drawn_from(
    changes: Mapping[str, Any], sampler: Sampler, policy: Policy, queries: list[Query]
) -> None:
    settings = RolloutConfig(**{"max_new_tokens": 16, "group_size": 4, **changes})
    groups = sampler.sample(queries, settings, KEY)
    expected = torch.cat([log_q(policy, sample, settings) for group in groups for sample in group.samples])
    assert (logprobs(groups) - expected).abs().max() < TOLERANCE
    assert (expected - likelihoods(policy, groups, settings.temperature)).abs().max() > 0.01 or "temperature" in changes
    assert {sample.full_logprobs is None for group in groups for sample in group.samples} == {not settings.shaping}


def test_a_response_ends_with_its_first_stop_token_or_at_its_longest(
    sampler: Sampler, queries: list[Query], policy: Policy
) -> None:
    settings = SETTINGS.model_copy(update={"group_size": 16})
    samples = [sample for group in sampler.sample(queries, settings, KEY) for sample in group.samples]
    for sample in samples:
        ends = [index for index, token in enumerate(sample.token_ids.tolist()) if token in policy.stop_ids]
        assert ends == ([sample.num_tokens - 1] if sample.finish_reason == "stop" else [])
        assert sample.finish_reason == "stop" or sample.num_tokens == 12
        assert sample.text == policy.tokenizer.decode(sample.token_ids[: ends[0] if ends else None])
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


def test_a_stop_string_cuts_the_response_after_the_token_that_completes_it(
    sampler: Sampler, queries: list[Query], policy: Policy
) -> None:
    whole = sampler.sample(queries, SETTINGS.model_copy(update={"group_size": 16}), KEY)
    text = next(sample.text for group in whole for sample in group.samples if sample.num_tokens > 5)
    string = text[len(text) // 2 :][:2]
    cut = sampler.sample(queries, SETTINGS.model_copy(update={"group_size": 16, "stop_strings": (string,)}), KEY)
    pairs = [pair for two in zip(whole, cut, strict=True) for pair in zip(*(one.samples for one in two), strict=True)]
    for before, after in pairs:
        count = after.num_tokens
        assert after.token_ids.tolist() == before.token_ids.tolist()[:count]
        assert torch.equal(after.sampler_logprobs, before.sampler_logprobs[:count]) and len(after.loss_mask) == count
        assert string not in policy.tokenizer.decode(after.token_ids[:-1], skip_special_tokens=True)
        assert (string in after.text) == (string in before.text)
        assert after.finish_reason == ("stop" if string in after.text else before.finish_reason)
    assert 0 < sum(string in after.text for _, after in pairs) < len(pairs)


def test_the_same_key_gives_the_same_responses_whatever_is_sampled_beside_them(
    sampler: Sampler, queries: list[Query]
) -> None:
    expected = sampler.sample(queries, SETTINGS, KEY)
    alone = sampler.sample(queries[1:2], SETTINGS, KEY)
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == tokens(expected)
    assert tokens(alone) == tokens(expected[1:2])
    for key in (SamplingKey(seed=1, step=1), SamplingKey(seed=0, step=2)):
        others = tokens(sampler.sample(queries, SETTINGS, key))
        assert all(other != own for other, own in zip(others, tokens(expected), strict=True))


def test_no_two_responses_of_a_call_repeat_each_others_random_numbers(
    sampler: Sampler, query_of: Callable[..., Query]
) -> None:
    long = RolloutConfig(max_new_tokens=24, group_size=8, logit_bias={"id:0": -100.0, "id:1": -100.0, "id:2": -100.0})
    twice = [query_of([4, 5, 6], 0), query_of([4, 5, 6], 0), query_of([4, 5, 6], 1)]
    responses = [tuple(own) for group in tokens(sampler.sample(twice, long, KEY)) for own in group]
    assert len(set(responses)) == len(responses)


# Weights


def sampled_beside(
    sampler: Sampler,
    queries: Sequence[Query],
    settings: RolloutConfig,
    proxy: Proxy,
    change_and_publish: Callable[[], None],
) -> list[Sample]:
    """Responses, beside which other weights are published again and again until all of them have ended."""
    keys, before = KEY.of_groups([query.id for query in queries], settings.group_size), len(proxy.groups())
    works = [sampler.group(query, settings, own) for query, own in zip(queries, keys, strict=True)]
    under_way = loop.start(all_of(works))
    while len(proxy.groups()) < before + len(queries):
        time.sleep(0.001)
    while not under_way.done():
        change_and_publish()
    return [sample for group in under_way.result() for sample in group.samples]


@pytest.mark.parametrize("how", ["old_cache=recompute", "old_cache=keep", "interrupt=false"])
def test_a_token_that_is_sampled_beside_the_training_has_the_likelihood_of_the_weights_that_drew_it(
    how: str, policy: Policy, queries: list[Query], proxy: Proxy, key: str, tmp_path: Path
) -> None:
    policy = replace(policy, stop_ids=())  # else a response may have ended before new weights come
    keys = ("rollout.max_staleness=1", f"rollout.{how}", "actor.old_logprobs=engine")
    sampler = Sampler(engine_of(policy, tmp_path, urls=(proxy.url,), keys=keys), policy)
    settings = SETTINGS.model_copy(update={"max_new_tokens": 600})
    weights: list[dict[str, torch.Tensor]] = []  # by version
    first = [parameter.detach().clone() for parameter in policy.model.parameters()]

    def change_and_publish() -> None:
        with torch.no_grad():
            for parameter, own in zip(policy.model.parameters(), first, strict=True):
                parameter.copy_(own + 0.1 * torch.randn_like(own))
        weights.append({name: own.clone() for name, own in policy.model.state_dict().items()})
        sampler.publish(len(weights) - 1)

    change_and_publish()
    for _ in range(ATTEMPTS):
        samples = sampled_beside(sampler, queries, settings, proxy, change_and_publish)
        spans = max(len(sample.versions) for sample in samples) > 1
        if spans or how == "interrupt=false":
            break
    assert spans == (how != "interrupt=false")
    is_kept = how == "old_cache=keep"
    gaps: dict[bool, list[torch.Tensor]] = {True: [], False: []}  # by whether it is the response's first version
    for sample in samples:
        versions = [version for version, count in sample.versions for _ in range(count)]
        assert len(versions) == sample.num_tokens and versions == sorted(versions)
        for number in set(versions):
            policy.model.load_state_dict(weights[number])
            gap = (sample.sampler_logprobs - likelihoods(policy, [Group(samples=(sample,))])).abs()
            gaps[number == versions[0]].append(gap[torch.tensor(versions) == number])
    assert torch.cat(gaps[True] if is_kept else gaps[True] + gaps[False]).max() < TOLERANCE
    # With keys and values that other weights have computed, a token is no single policy's.
    assert (torch.cat([*gaps[False], torch.zeros(1)]).max() > 1e-2) == is_kept


def test_what_is_published_is_sampled_from_and_named_once_a_version(
    new_sampler: Callable[..., Sampler], policy: Policy, queries: list[Query], proxy: Proxy
) -> None:
    sampler = new_sampler()
    before = sampler.sample(queries, SETTINGS, KEY)
    change(policy)
    num_requests = len(proxy.requests)
    sampler.publish(0)
    assert len(proxy.requests) == num_requests
    sampler.publish(17)
    after = sampler.sample(queries, SETTINGS, KEY)
    assert tokens(after) != tokens(before)
    assert {sample.versions[0][0] for group in after for sample in group.samples} == {17}
    assert (logprobs(after) - likelihoods(policy, after)).abs().max() < TOLERANCE


def test_what_publishing_takes_and_proves_is_measured(new_sampler: Callable[..., Sampler], policy: Policy) -> None:
    sampler = new_sampler()
    measured = sampler.engine.take_metrics()
    assert measured["engine/probe_gap_mean"] <= measured["engine/probe_gap_max"] < TOLERANCE
    assert measured["engine/probe_gap_of_other_weights"] > 0.1  # weights that are not the policy's
    assert 0 < measured["engine/publish_seconds"] < 30
    assert measured["engine/retries"] == measured["engine/restarts"] == 0
    assert sampler.engine.take_metrics()["engine/publish_seconds"] == 0
    sampler.publish(1)
    assert sampler.engine.take_metrics()["engine/publish_seconds"] > 0
    described = sampler.engine.describe()
    assert described["engine"] == "vllm" and described["engine dtype"] == "float32"
    assert described["engine version"].startswith("0.32")


def test_a_run_that_goes_on_in_mid_step_has_no_gap_before_it_publishes(
    server: RunningServer, policy: Policy, key: str, tmp_path: Path
) -> None:
    measured = engine_of(policy, tmp_path, urls=(server.url,)).take_metrics()
    assert math.isnan(measured["engine/probe_gap_mean"]) and math.isnan(measured["engine/probe_gap_max"])
    assert measured["engine/probe_gap_of_other_weights"] > 0.1 and measured["engine/publish_seconds"] == 0


def test_a_server_that_somebody_has_started_anew_is_looked_at_like_a_new_one(
    new_sampler: Callable[..., Sampler], policy: Policy, queries: list[Query], proxy: Proxy
) -> None:
    sampler = new_sampler()
    expected = sampler.sample(queries, SETTINGS, KEY)
    num_requests = len(proxy.requests)
    proxy.disturb(answering(200, '{"weight_version": "default"}'), path="/weight_info", when=lambda body: True)
    sampler.publish(1)
    paths = [path for path, _ in proxy.requests[num_requests:]]
    assert paths.count("/collective_rpc") == 2 and any(path.startswith("/server_info") for path in paths)
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == tokens(expected)
    num_requests = len(proxy.requests)
    sampler.publish(2)
    assert [path for path, _ in proxy.requests[num_requests:]].count("/collective_rpc") == 1


def stale(exchange: Any) -> None:
    """A server that takes weights and keeps what it has."""
    exchange.answer(200, b'{"results": [0]}')


def test_every_tensor_that_a_server_keeps_is_noticed_before_anything_is_sampled(
    new_sampler: Callable[..., Sampler], policy: Policy, proxy: Proxy
) -> None:
    sampler = new_sampler()
    proxy.disturb(stale, path="/collective_rpc", times=10**6, when=lambda body: True)
    names = [name for name, _ in policy.model.named_parameters() if ".layers.0." not in name]  # one layer will do
    for version, name in enumerate(names, start=1):
        own = policy.model.get_parameter(name)
        was = own.detach().clone()
        with torch.no_grad():
            own.copy_(0.9 * own.flip(0))
        with pytest.raises(RunError, match="does not have the policy's weights") as error:
            sampler.publish(version)
        assert "mean gap of log-likelihoods" in str(error.value), name
        with torch.no_grad():
            own.copy_(was)
    assert len(names) > 10 and not proxy.groups()


def test_a_server_that_has_the_weights_already_and_takes_no_others_is_noticed(
    new_sampler: Callable[..., Sampler], proxy: Proxy
) -> None:
    new_sampler()
    proxy.disturb(stale, path="/collective_rpc", times=10**6, when=lambda body: True)
    with pytest.raises(RunError, match="server at http"):
        new_sampler()


def test_vllms_own_way_to_replace_weights_which_keeps_a_packed_copy_is_noticed(
    new_sampler: Callable[..., Sampler], policy: Policy, server: RunningServer, proxy: Proxy, tmp_path: Path
) -> None:
    sampler = new_sampler()
    change(policy)
    policy.save(tmp_path / "saved")
    # vLLM refuses to reload after `--load-format dummy`, until it is told otherwise.
    call(server.url, "update_config", overrides={"load_config": {"load_format": "auto"}})
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "saved")}}
    proxy.disturb(asking(body), path="/collective_rpc", when=lambda body: True)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        sampler.publish(1)
    assert not proxy.rules[0].times and not proxy.groups()
    sampler.publish(2)  # ours replaces all of it


def test_weights_that_are_not_finite_are_not_given_to_a_server(
    new_sampler: Callable[..., Sampler], policy: Policy, queries: list[Query], proxy: Proxy
) -> None:
    sampler = new_sampler()
    expected = sampler.sample(queries, SETTINGS, KEY)
    before, last = len(proxy.requests), list(policy.model.parameters())[-1]
    was = last.detach().clone()
    with torch.no_grad():
        last.view(-1)[0] = torch.nan
    with pytest.raises(DivergedError, match="not finite"):
        sampler.publish(1)
    assert [path for path, _ in proxy.requests[before:]] == ["/weight_info"]  # whose weights it has, and no more
    with torch.no_grad():
        last.copy_(was)
    sampler.publish(2)
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == tokens(expected)


def test_weights_in_files_give_the_same_and_leave_no_file(
    new_sampler: Callable[..., Sampler], queries: list[Query], tmp_path: Path
) -> None:
    expected = new_sampler().sample(queries, SETTINGS, KEY)
    sampler = new_sampler(weights="files", weights_dir=str(tmp_path / "shared"))
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == tokens(expected)
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize(
    "path", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
)
def test_a_server_that_cannot_take_weights_ends_the_run_with_its_words_and_serves_the_next(
    path: str, new_sampler: Callable[..., Sampler], policy: Policy, queries: list[Query], proxy: Proxy
) -> None:
    sampler = new_sampler()
    proxy.disturb(answering(500, "the disk of weights is full"), path=path, when=lambda body: True, times=3)
    with pytest.raises(RunError, match=f"does not take the policy's weights: {path}.*the disk of weights is full"):
        sampler.publish(1)
    proxy.rules.clear()
    groups = new_sampler().sample(queries, SETTINGS, KEY)
    assert (logprobs(groups) - likelihoods(policy, groups)).abs().max() < TOLERANCE


def call(url: str, method: str, **keywords: Any) -> None:
    """Call a method of the server's workers."""
    body, headers = {"method": method, "kwargs": keywords}, {"Authorization": f"Bearer {real.KEY}"}
    httpx.post(f"{url}/collective_rpc", json=body, headers=headers, trust_env=False).raise_for_status()


# Faults while it samples


def first_response(change: Callable[[dict[str, Any]], object]) -> Fault:
    return changing(lambda answer: change(answer["choices"][0]))


def first_logprob(value: float) -> Fault:
    return first_response(lambda choice: choice["logprobs"]["content"][0].update(logprob=value))


FAULTS: dict[str, tuple[Fault, str]] = {
    "hangs": (hang, "no answer within 2 s"),
    "status 500": (answering(500, "out of memory, said the server"), "out of memory, said the server"),
    "status 503": (answering(503, "no engine is ready"), "no engine is ready"),
    "connection dropped": (drop, "RemoteProtocolError"),
    "half of the JSON": (truncate, "the answer is no JSON"),
    "no JSON": (answering(200, "<html>welcome</html>"), "<html>welcome"),
    "nothing": (answering(200, ""), "another form"),
    "JSON of another form": (answering(200, '{"choices": 7}'), "another form"),
    "a list": (answering(200, "[1, 2]"), "another form"),
    "no log-likelihoods": (first_response(lambda choice: choice.update(logprobs=None)), "another form"),
    "a log-likelihood less": (first_response(lambda choice: choice["logprobs"]["content"].pop()), "log-likelihoods of"),
    "log-likelihoods of others": (
        first_response(lambda choice: choice["logprobs"]["content"][0].update(token_id=10**6)),
        "not of the same",
    ),
    "log-likelihood null": (first_logprob(None), "another form"),  # type: ignore[arg-type]
    "log-likelihood NaN": (first_logprob(math.nan), "not finite"),
    "log-likelihood clamped": (first_logprob(-9999.0), "not finite"),
    "log-likelihood above 0": (first_logprob(0.5), "not finite"),
    "fewer responses": (changing(lambda answer: answer["choices"].pop()), "2 completions where 3 were asked for"),
    "more responses": (
        changing(lambda answer: answer["choices"].append(answer["choices"][0])),
        "4 completions where 3",
    ),
    "a response twice": (
        changing(lambda answer: answer["choices"].__setitem__(1, answer["choices"][0])),
        "index",
    ),
    "other weights": (
        first_response(lambda choice: choice["weight_versions"][0].update(version="abc-7")),
        "sampled with the weights abc-7",
    ),
    "aborted": (first_response(lambda choice: choice.update(finish_reason="abort")), "finish_reason abort"),
    "cut off": (
        first_response(
            lambda choice: choice.update(
                finish_reason="length", token_ids=[3], logprobs={"content": [{"token_id": 3, "logprob": -1.0}]}
            )
        ),
        "cut off after 1 tokens",
    ),
    "no tokens": (
        first_response(lambda choice: choice.update(token_ids=[], logprobs={"content": []})),
        "0 tokens",
    ),
}


@pytest.fixture(scope="module")
def undisturbed(shared: Sampler, query_of: Callable[..., Query]) -> tuple[Group, ...]:
    """What every call with these arguments gives."""
    shared.publish(next(VERSIONS))
    return shared.sample(some_queries(query_of), SETTINGS, KEY)


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> tuple[Fault, str]:
    return FAULTS[request.param]


def test_a_fault_is_mended_and_only_what_is_missing_is_asked_for_again(
    fault: tuple[Fault, str],
    sampler: Sampler,
    queries: list[Query],
    proxy: Proxy,
    undisturbed: tuple[Group, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault[0] is hang:
        monkeypatch.setattr(sampler.engine, "_request_seconds", PATIENCE)
    proxy.disturb(fault[0])
    shown: list[int] = []
    groups = sampler.sample(queries, SETTINGS, KEY, show_progress=lambda done, *_: shown.append(done))
    assert tokens(groups) == tokens(undisturbed) and torch.equal(logprobs(groups), logprobs(undisturbed))
    assert [group.query for group in groups] == queries
    assert len(proxy.groups()) == len(queries) + 1 and shown == sorted(shown)
    measured = sampler.engine.take_metrics()
    assert (measured["engine/retries"], measured["engine/restarts"]) == (1, 0)


@pytest.mark.parametrize("name", ["status 500", "hangs", "fewer responses", "log-likelihood NaN", "other weights"])
def test_three_attempts_in_vain_end_the_run_with_the_servers_words(
    name: str, sampler: Sampler, queries: list[Query], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler.engine, "_request_seconds", PATIENCE)
    fault, words = FAULTS[name]
    proxy.disturb(fault, times=3)
    with pytest.raises(RunError, match=f"no response in 3 attempts: server at {proxy.url}: .*{words}"):
        sampler.sample(queries[:1], SETTINGS, KEY)
    assert len(proxy.groups()) == 3
    assert tokens(sampler.sample(queries[:1], SETTINGS, KEY))


def test_a_server_that_answers_nothing_at_all_is_not_waited_for(
    sampler: Sampler,
    queries: list[Query],
    proxy: Proxy,
    undisturbed: tuple[Group, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(one_server, "_LOOK_SECONDS", 0.05)
    proxy.disturb(hang)
    proxy.disturb(answering(500, ""), path="/health", times=3, when=lambda body: True)
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == tokens(undisturbed)
    assert sampler.engine.take_metrics()["engine/retries"] == 1


def test_a_request_that_the_server_refuses_ends_the_run_at_once(
    sampler: Sampler, queries: list[Query], proxy: Proxy
) -> None:
    proxy.disturb(answering(401, '{"error": "wrong or missing key"}'))
    with pytest.raises(RunError, match=r"refuses a request: .*401.*wrong or missing key"):
        sampler.sample(queries, SETTINGS, KEY)
    assert len(proxy.groups()) <= len(queries)
    assert len(sampler.sample(queries, SETTINGS, KEY)) == len(queries)


def test_a_stop_in_mid_request_leaves_the_engine_ready_and_the_server_idle(
    server: RunningServer, policy: Policy, queries: list[Query], key: str, tmp_path: Path
) -> None:
    sampler = Sampler(engine_of(policy, tmp_path, urls=(server.url,)), policy)
    sampler.publish(0)
    expected = tokens(sampler.sample(queries, SETTINGS, KEY))
    long = RolloutConfig(
        group_size=16, max_new_tokens=900, logit_bias={f"id:{token}": -100.0 for token in policy.stop_ids}
    )
    started, interrupt = time.monotonic(), Interrupt(lambda _: None)

    def stop(*_: object) -> None:
        if running(server.url):
            interrupt.signal = signal.SIGTERM

    with interrupt, pytest.raises(Stopped):
        sampler.sample(queries, long, KEY, show_progress=stop)
    while running(server.url):
        assert time.monotonic() - started < 10
        time.sleep(0.05)
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == expected
    assert sampler.engine.take_metrics()["engine/retries"] == 0


def running(url: str) -> float:
    """How many responses the server is at."""
    answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {real.KEY}"}, trust_env=False)
    return sum(
        float(line.split()[-1]) for line in answer.text.splitlines() if line.startswith("vllm:num_requests_running{")
    )


# Another server behind the address


def set_value(*path: str, value: Any) -> Fault:
    def change(answer: Any) -> None:
        for name in path[:-1]:
            answer = answer[name]
        answer[path[-1]] = value

    return changing(change)


OTHER_SERVERS: dict[str, tuple[Fault, str]] = {
    "raw log-likelihoods": (
        set_value("vllm_config", "model_config", "logprobs_mode", value="raw_logprobs"),
        "--logprobs-mode processed_logprobs",
    ),
    "too short": (set_value("vllm_config", "model_config", "max_model_len", value=111), "--max-model-len 112 or more"),
    "no worker of ours": (
        set_value("vllm_config", "parallel_config", "worker_extension_cls", value=""),
        "--worker-extension-cls gspo_vllm_worker.Worker",
    ),
    "quantised": (set_value("vllm_config", "model_config", "quantization", value="fp8"), "no quantisation"),
    "quantised cache": (set_value("vllm_config", "cache_config", "cache_dtype", value="fp8"), "no quantisation"),
    "speculative": (set_value("vllm_config", "speculative_config", value={"method": "ngram"}), "no speculative"),
    "of another form": (answering(200, '{"status": "ok"}'), "vllm_config"),
    "no vLLM": (answering(404, "Not Found"), "404"),
    "no JSON": (answering(200, "<html>"), "no JSON"),
}


@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_a_server_that_would_compute_something_else_is_refused_before_it_gets_weights(
    name: str, new_sampler: Callable[..., Sampler], proxy: Proxy
) -> None:
    fault, words = OTHER_SERVERS[name]
    proxy.disturb(fault, path="/server_info", times=10**6, when=lambda body: True)
    with pytest.raises(UserError) as error:
        new_sampler(start_seconds=0.2)
    assert f"server at {proxy.url}" in str(error.value) and words in str(error.value)
    assert "/collective_rpc" not in [path for path, _ in proxy.requests]


def test_servers_of_different_versions_are_refused_before_they_get_weights(
    new_sampler: Callable[..., Sampler], server: RunningServer, proxy: Proxy
) -> None:
    other = set_value("system_env", "vllm_version", value="0.33.0")
    proxy.disturb(other, path="/server_info", times=10**6, when=lambda body: True)
    with pytest.raises(UserError, match=r"servers of vllm 0\.32\.0.* and 0\.33\.0, which would sample other numbers"):
        new_sampler(urls=(proxy.url, server.url))
    assert "/collective_rpc" not in [path for path, _ in proxy.requests]


@pytest.mark.parametrize("wrong", ["", "another"])
def test_a_wrong_key_is_named(wrong: str, new_sampler: Callable[..., Sampler], monkeypatch: Any) -> None:
    monkeypatch.setenv("GSPO_ENGINE_KEY", wrong)
    with pytest.raises(UserError, match=r"401: .*wrong or missing key.*\n  fix: .*GSPO_ENGINE_KEY"):
        new_sampler()


def test_an_address_where_nothing_listens_is_named(policy: Policy, key: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"server at {url}: it is not ready after 0.2 s: .*\n  fix: docs/engines.md"):
        engine_of(policy, tmp_path, urls=(url,), start_seconds=0.2)


def test_a_server_of_another_model_is_refused_and_stays_whole(
    new_policy: NewPolicy, policy: Policy, proxy: Proxy, new_sampler: Any, queries: list[Query], tmp_path: Path
) -> None:
    expected = tokens(new_sampler().sample(queries, SETTINGS, KEY))
    for other in ({"intermediate_size": 48}, {"num_hidden_layers": 1}, {"tie_word_embeddings": False}):
        with pytest.raises(UserError, match=r"rollout\.vllm: server at .* differ in name or shape"):
            engine_of(new_policy(**{**SHAPE, **other}), tmp_path, urls=(proxy.url,))
    assert tokens(new_sampler().sample(queries, SETTINGS, KEY)) == expected


def test_a_server_of_the_same_shapes_and_another_function_is_noticed(
    new_policy: NewPolicy, proxy: Proxy, new_sampler: Any, tmp_path: Path
) -> None:
    other = new_policy(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    engine = engine_of(other, tmp_path, urls=(proxy.url,))
    with pytest.raises(RunError, match="does not have the policy's weights"):
        engine.publish(0)


# Adapters


@pytest.fixture
def adapted(policy: Policy, tmp_path: Path) -> Policy:
    """The same policy with an adapter that is new, and has no effect."""
    policy.save(tmp_path / "base")
    recipe = ModelConfig(path=str(tmp_path / "base"), device="cpu", lora=LoraConfig(rank=4))
    return load_policy(recipe, policy.tokenizer, seed=0)


def small_adapter(policy: Policy) -> dict[str, torch.Tensor]:
    """Numbers whose effect is less than what half precision rounds away."""
    return {name: tensor / 16 for name, tensor in (moved_adapter(policy.model) or {}).items()}


def give(policy: Policy, numbers: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in adapter_of(policy.model).items():
        parameter.data = numbers[name].clone()


@needs("peft")
def test_a_merged_adapter_that_a_server_has_not_got_or_got_twice_is_noticed(
    adapted: Policy, server: RunningServer, key: str, queries: list[Query], tmp_path: Path, monkeypatch: Any
) -> None:
    small = small_adapter(adapted)
    engine = engine_of(adapted, tmp_path, urls=(server.url,))
    for version in (0, 1):  # the first has no effect
        engine.publish(version)
        groups = Sampler(engine, adapted).sample(queries, SETTINGS, replace(KEY, step=version))
        assert (logprobs(groups) - likelihoods(adapted, groups)).abs().max() < TOLERANCE
        give(adapted, small)
    for share in (0, 2):
        numbers = {name: tensor * share if "lora_B" in name else tensor for name, tensor in small.items()}

        def others(model: Any, names: Any, numbers: Mapping[str, torch.Tensor] = numbers) -> dict[str, torch.Tensor]:
            with with_adapter(model, numbers):
                return merged_tensors(model, names)

        with monkeypatch.context() as patch:
            patch.setattr("gspo.model.weights.merged_tensors", others)
            with pytest.raises(RunError, match=r"does not have the policy's weights.* times the adapter") as error:
                engine.publish(10 + share)
        shown = float(str(error.value).split(" times the adapter")[0].split("; ")[-1])
        assert shown == pytest.approx(share, abs=0.2)  # logits are not quite linear in the adapter
        engine.publish(20 + share)
    engine.close()


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def new_adapter_engine(adapted: Policy, proxy: Proxy, key: str, tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    """Engines of the adapted policy whose server, behind the proxy, is as if the run had started it."""
    monkeypatch.setattr("gspo.engine.make._lora_options", lambda *_: real.LORA)
    engines: list[ServerEngine] = []

    def build(policy: Policy = adapted, keys: Sequence[str] = ()) -> ServerEngine:
        engines.append(engine_of(policy, tmp_path, urls=(proxy.url,), keys=keys))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def adapters_in(server: RunningServer, proxy: Proxy) -> list[str]:
    """The names of this test's adapters that a request may ask for."""
    own = {body["lora_name"] for path, body in proxy.requests if path == LOAD}
    answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {real.KEY}"}, trust_env=False)
    return [model["id"] for model in answer.json()["data"] if model["id"] in own]


@needs("peft")
def test_each_version_of_an_adapter_is_a_name_of_its_own_beside_weights_that_are_handed_over_once(
    adapted: Policy, new_adapter_engine: Any, server: RunningServer, queries: list[Query], proxy: Proxy
) -> None:
    engine, small = new_adapter_engine(), small_adapter(adapted)
    sampler, seen = Sampler(engine, adapted), list[list[list[list[int]]]]()
    for version in (0, 1, 0, 1, 0):  # a number that comes again is a name that does not
        sampler.publish(version)
        groups = sampler.sample(queries, SETTINGS, KEY)
        assert (logprobs(groups) - likelihoods(adapted, groups)).abs().max() < TOLERANCE
        assert {sample.versions[0][0] for group in groups for sample in group.samples} == {version}
        assert len(adapters_in(server, proxy)) == 1
        seen.append(tokens(groups))
        give(adapted, {name: tensor * 4 * (len(seen) + 1) for name, tensor in small.items()})
    assert all(own != other for own, other in pairwise(seen))
    names = [body["lora_name"] for path, body in proxy.requests if path == LOAD]
    assert [path for path, _ in proxy.requests].count("/collective_rpc") == 2  # no policy's, and those beneath
    assert len({*names}) == 5
    assert [body["lora_name"] for path, body in proxy.requests if path == UNLOAD] == names[:-1]


@needs("peft")
def test_a_response_under_way_ends_with_the_adapter_that_it_began_with(
    adapted: Policy, new_adapter_engine: Any, server: RunningServer, queries: list[Query], proxy: Proxy
) -> None:
    adapted = replace(adapted, stop_ids=())
    engine = new_adapter_engine(adapted, ("rollout.max_staleness=1", "actor.old_logprobs=engine"))
    first = {name: tensor.detach().clone() for name, tensor in adapter_of(adapted.model).items()}
    engine.publish(0)
    (name,), released, kept, numbers = adapters_in(server, proxy), threading.Event(), list[bool](), count(1)

    def hold(exchange: Exchange) -> None:
        status, content = exchange.forward()
        released.wait()
        exchange.answer(status, content)

    def change_and_publish() -> None:
        give(adapted, {name: len(kept) * own for name, own in moved(adapted).items()})
        engine.publish(next(numbers))
        kept.append(name in adapters_in(server, proxy))
        if len(kept) == 2:
            released.set()

    proxy.disturb(hold)
    settings = SETTINGS.model_copy(update={"max_new_tokens": 300})
    samples = sampled_beside(Sampler(engine, adapted), queries, settings, proxy, change_and_publish)
    engine.publish(next(numbers))
    assert kept[:2] == [True, True] and len(adapters_in(server, proxy)) == 1
    give(adapted, first)
    groups = [Group(samples=(sample,)) for sample in samples]
    assert {sample.versions for sample in samples} == {((0, 300),)}
    assert (logprobs(groups) - likelihoods(adapted, groups)).abs().max() < TOLERANCE


def moved(policy: Policy) -> Mapping[str, torch.Tensor]:
    return moved_adapter(policy.model) or {}


def another_adapter(change: Callable[[str, torch.Tensor], torch.Tensor], folder: Path) -> Fault:
    """The server loads the adapter with other numbers."""

    def fault(exchange: Exchange) -> None:
        shutil.copytree(exchange.body["lora_path"], folder)
        saved = load_file(folder / WEIGHTS)
        save_file({name: change(name, tensor) for name, tensor in saved.items()}, folder / WEIGHTS)
        exchange.answer(*exchange.forward({**exchange.body, "lora_path": str(folder)}))

    return fault


def scaled(**factors: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """B times a factor, by a part of the layer's name."""
    found = lambda name: (factor for part, factor in factors.items() if part in name and "lora_B" in name)  # noqa: E731
    return lambda name, tensor: tensor * next(found(name), 1.0)


ALTERED: dict[str, tuple[Callable[[str, torch.Tensor], torch.Tensor], str]] = {
    "stale": (scaled(layers=0.8), "; 0.8 times the adapter"),
    "without effect": (scaled(layers=0.0), "; 0 times the adapter"),
    "doubled": (scaled(layers=2.0), "; 2 times the adapter"),
    "a part lost": (scaled(v_proj=0.0), "; 0 times the adapter of v_proj"),
    "a part doubled and one lost": (
        scaled(gate_proj=2.0, up_proj=0.0),
        "; 2 times the adapter of gate_proj; 0 times the adapter of up_proj",
    ),
    "a layer lost": (scaled(**{"layers.1.": 0.0}), "mean gap"),
    "mixed": (lambda name, tensor: tensor.roll(1, 0) if "q_proj" in name else tensor, "mean gap"),
}


@needs("peft")
@pytest.mark.parametrize("name", ALTERED)
def test_an_adapter_that_is_not_the_trainers_in_any_part_is_noticed(
    name: str, adapted: Policy, new_adapter_engine: Any, proxy: Proxy, tmp_path: Path
) -> None:
    engine = new_adapter_engine()
    give(adapted, {name: tensor / 128 for name, tensor in moved(adapted).items()})
    engine.publish(0)
    change, words = ALTERED[name]
    proxy.disturb(another_adapter(change, tmp_path / "altered"), path=LOAD, when=lambda body: True)
    with pytest.raises(RunError, match="does not have the policy's weights") as error:
        engine.publish(1)
    assert words in str(error.value)
    assert engine._fleet.gap is not None and engine._fleet.gap.mean < 1e-4  # of half precision it would be none
    engine.publish(2)


@needs("peft")
@pytest.mark.parametrize("asked", ["the weights beneath", "the version before"])
def test_samples_of_the_model_without_the_adapter_or_with_the_last_are_noticed(
    asked: str, adapted: Policy, new_adapter_engine: Any, proxy: Proxy
) -> None:
    engine, last = new_adapter_engine(), "policy"
    give(adapted, small_adapter(adapted))
    engine.publish(0)
    if asked == "the version before":
        last = next(body["lora_name"] for path, body in proxy.requests if path == LOAD)
        give(adapted, {name: tensor * 1.1 for name, tensor in small_adapter(adapted).items()})
    as_asked = lambda exchange: exchange.answer(*exchange.forward({**exchange.body, "model": last}))  # noqa: E731
    proxy.disturb(as_asked, times=10**6, when=lambda body: True)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        engine.publish(1)


@needs("peft")
def test_a_server_that_has_failed_or_was_started_anew_is_given_its_adapter_again(
    adapted: Policy, new_adapter_engine: Any, queries: list[Query], proxy: Proxy
) -> None:
    sampler = Sampler(new_adapter_engine(), adapted)
    give(adapted, moved(adapted))
    sampler.publish(0)
    expected = tokens(sampler.sample(queries, SETTINGS, KEY))
    proxy.disturb(answering(500, "out of memory"))
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == expected
    proxy.disturb(answering(200, '{"weight_version": "default"}'), path="/weight_info", when=lambda body: True)
    sampler.publish(1)
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == expected
    assert [path for path, _ in proxy.requests].count("/collective_rpc") == 4


@needs("peft")
def test_an_adapter_that_a_server_does_not_load_ends_the_run_with_its_words(
    new_adapter_engine: Any, proxy: Proxy
) -> None:
    engine = new_adapter_engine()
    absent = lambda exchange: exchange.answer(*exchange.forward({**exchange.body, "lora_path": "/absent"}))  # noqa: E731
    proxy.disturb(absent, path=LOAD, when=lambda body: True)
    with pytest.raises(RunError, match=rf"does not take the policy's weights: {LOAD}: status 404: .*/absent"):
        engine.publish(0)
    engine.publish(0)
