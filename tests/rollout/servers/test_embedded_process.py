"""The embedded engine in a process of its own: what it samples, new weights under way, and its end."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.rollout.servers.test_vllm_process import LONG, assert_gone, family, supervisors

from gspo.errors import RunError, UserError
from gspo.model.linear import LIMITS
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, load_policy
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import ModelConfig, RolloutConfig, ServerConfig
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.engine import SamplingKey
from gspo.rollout.servers import process as one_process
from gspo.rollout.servers import server as one_server
from gspo.rollout.servers.api import Request
from gspo.rollout.servers.embedded import EmbeddedApi
from gspo.rollout.servers.engine import ServerEngine, server_engine
from gspo.rollout.servers.requests import Address, RefusedError
from gspo.types import Group, Query, Sample

ROOT = Path(__file__).parents[3]
SETTINGS, KEY = RolloutConfig(max_new_tokens=12, group_size=3), SamplingKey(seed=0, step=1)
KEYS = ["rollout.max_staleness=1", "actor.old_logprobs=engine", "rollout.max_new_tokens=400"]
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KEYS += [f"model.architecture.{name}={value}" for name, value in EXPERTS.items()]
KEYS += ["model.architecture.max_position_embeddings=1024"]


@pytest.fixture(scope="module")
def engine(fitted_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerEngine]:
    """One for all tests, for its start takes longer than all that is asked of it."""
    recipe = load_recipe(ROOT / "tests" / "tiny.yaml", KEYS)
    policy = load_policy(recipe.model, fitted_tokenizer, seed=3)
    options: dict[str, Any] = {"directory": tmp_path_factory.mktemp("run"), "check_stop": lambda: None}
    engine = server_engine(recipe, policy, longest_sequence=420, say=lambda _: None, **options)
    yield engine
    engine.close()
    assert all(server.process and server.process.has_ended() for server in engine._fleet.servers)


@pytest.fixture
def policy(engine: ServerEngine) -> Policy:
    engine.publish(engine._policy, engine._fleet.version + 1)
    return engine._policy


@pytest.fixture
def queries(query_of: Callable[..., Query]) -> list[Query]:
    return [query_of([4, 5, 6], 0), query_of([7], 1), query_of([3, 9, 8, 4, 5], 2)]


def test_a_server_gets_no_limits_that_this_process_has_set_for_itself(engine: ServerEngine) -> None:
    process: Any = engine._fleet.servers[0].process
    assert os.environ.items() >= LIMITS.items()
    assert not LIMITS.keys() & psutil.Process(process._supervisor.pid).environ().keys()


@pytest.mark.parametrize("shaping", [{}, {"top_p": 0.9, "stop_strings": ("1",)}, {"temperature": 0.0}])
def test_it_samples_bit_by_bit_what_the_trainers_own_process_would(
    engine: ServerEngine, policy: Policy, queries: list[Query], shaping: dict[str, Any]
) -> None:
    settings, own = SETTINGS.model_copy(update=shaping), EmbeddedEngine(policy)
    own.publish(policy, engine._fleet.version)
    groups = [each.sample(queries, settings, KEY, record_experts=True) for each in (engine, own)]
    for there, here in zip(*([sample for group in own for sample in group.samples] for own in groups), strict=True):
        assert there.token_ids.tolist() == here.token_ids.tolist() and there.versions == here.versions
        assert torch.equal(there.sampler_logprobs, here.sampler_logprobs)
        assert (there.text, there.finish_reason) == (here.text, here.finish_reason)
        assert (there.full_logprobs is None) == (here.full_logprobs is None)
        assert here.full_logprobs is None or torch.equal(there.full_logprobs, here.full_logprobs)
        for part in ("prefix", "row"):
            assert torch.equal(getattr(there.experts, part), getattr(here.experts, part))


def test_new_weights_are_at_work_from_the_next_token_on_and_named(
    engine: ServerEngine, policy: Policy, queries: list[Query], plain_logprobs: Any
) -> None:
    settings = SETTINGS.model_copy(update={"max_new_tokens": 400})
    weights = {engine._fleet.version: {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}}
    options: dict[str, Any] = {"record_experts": False, "check_stop": lambda: None}
    samples: list[Sample] = []
    for step in range(20):  # all responses may have ended before new weights come
        groups, key = dict[int, Group](), SamplingKey(seed=0, step=step)
        arguments = (queries, settings, key, groups.__setitem__)
        beside = threading.Thread(target=engine.sample_beside, args=arguments, kwargs=options)
        beside.start()
        while beside.is_alive():
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            version = engine._fleet.version + 1
            weights[version] = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
            engine.publish(policy, version)
        assert len(groups) == len(queries)
        samples = [sample for group in groups.values() for sample in group.samples]
        if max(len(sample.versions) for sample in samples) > 1:
            break
    else:
        raise AssertionError("no response was under way while new weights came")
    for sample in samples:
        for version, start, end in spans(sample.versions):
            policy.model.load_state_dict(weights[version])
            sequence = TokenSequence(prompt_ids=sample.query.prompt_ids, response_ids=sample.token_ids)
            with torch.no_grad():
                expected = plain_logprobs(policy, [sequence])
            assert (sample.sampler_logprobs - expected).abs()[start:end].max() < 1e-5


def spans(versions: Any) -> Iterator[tuple[int, int, int]]:
    start = 0
    for version, length in versions:
        yield version, start, start + length
        start += length


def test_a_process_that_dies_with_responses_under_way_is_started_anew_and_asked_again(
    engine: ServerEngine, policy: Policy, queries: list[Query]
) -> None:
    expected = engine.sample(queries, SETTINGS, KEY)
    engine.take_metrics()
    process = engine._fleet.servers[0].process
    (server,) = psutil.Process(process._supervisor.pid).children()  # type: ignore[union-attr]
    found: dict[int, Group] = {}
    options: dict[str, Any] = {"record_experts": False, "check_stop": lambda: None}
    beside = threading.Thread(target=engine.sample_beside, args=(queries, LONG, KEY, found.__setitem__), kwargs=options)
    before = server.cpu_times().user
    beside.start()
    while beside.is_alive() and server.cpu_times().user < before + 0.05:  # it decodes
        pass
    server.kill()
    beside.join()
    assert found == {}
    again = engine.sample(queries, SETTINGS, KEY)
    assert [s.token_ids.tolist() for g in again for s in g.samples] == [
        s.token_ids.tolist() for g in expected for s in g.samples
    ]
    assert engine.take_metrics()["engine/restarts"] == 1


def test_a_version_that_is_published_already_changes_nothing(engine: ServerEngine, policy: Policy) -> None:
    version, label = engine._fleet.version, engine._fleet.servers[0].label
    engine.take_metrics()
    engine.publish(policy, version)
    assert engine._fleet.servers[0].label == label and engine.take_metrics()["engine/publish_seconds"] == 0


def test_it_answers_nobody_without_the_runs_key(engine: ServerEngine, policy: Policy) -> None:
    own = engine._fleet.servers[0]
    stranger = Address(own.address.url, "another")
    with pytest.raises(RefusedError, match="401"):
        engine._fleet.watch(lambda client: stranger.ask(client, "/about", seconds=5.0), lambda: None)


def test_weights_of_another_model_are_refused(
    engine: ServerEngine, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._api, "publish", lambda paths, label: [publish(paths[1:], label)])

    def publish(paths: list[str], label: str) -> Request:
        return Request(path="/weights", body={"paths": paths, "label": label, "at_publish": "recompute"})

    with pytest.raises(RunError, match="tensors are not given"):
        engine.publish(policy, engine._fleet.version + 1)


@pytest.mark.parametrize(("devices", "expected"), [(("1",), "cuda"), ((), "cuda:1")])
def test_a_process_that_sees_its_own_devices_only_numbers_them_anew(devices: tuple[str, ...], expected: str) -> None:
    model = ModelConfig(path="model", device="cuda:1")
    api = EmbeddedApi(
        ServerConfig(devices=devices), max_rows=1, model=model, stop_tokens=(), routing=None, at_publish="recompute"
    )
    command = api.command(model=Path("model"), address="", port=1, max_length=8, dtype="float32", kind="")
    assert json.loads(command[-1])["model"]["device"] == expected


def test_a_server_that_dies_or_hangs_in_mid_request_is_started_again_and_nothing_else_changes(
    fitted_tokenizer: Any, queries: list[Query], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks after servers is the same for vLLM's, whose start takes ten times as long."""
    recipe = load_recipe(ROOT / "tests" / "tiny.yaml", [*KEYS, "rollout.embedded.devices=['0', '1']"])
    policy = load_policy(recipe.model, fitted_tokenizer, seed=3)
    options: dict[str, Any] = {"directory": tmp_path, "check_stop": lambda: None, "say": lambda _: None}
    engine = server_engine(recipe, policy, longest_sequence=420, **options)
    engine.publish(policy, 5)
    expected = engine.sample(queries, LONG, KEY)
    # A server that is stopped takes connections and answers none.
    monkeypatch.setattr(one_server, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(one_server, "_ANSWER_SECONDS", 1.0)
    for number, end in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        (supervisor,) = (each for each in supervisors(os.getpid()) if each.pid == pid_of(engine, number))
        processes = family(supervisor)
        server = supervisor.children()[0]
        groups = engine.sample(queries, LONG, KEY, check_stop=first_call(partial(server.send_signal, end)))
        assert tokens(groups) == tokens(expected)
        assert [sample.versions for group in groups for sample in group.samples] == [((5, 300),)] * 24
        measured = engine.take_metrics()
        assert (measured["engine/retries"], measured["engine/restarts"]) == (1, 1)
        assert_gone(processes, set())
    assert "gspo: the server has ended with status" in (tmp_path / "embedded_0.log").read_text()
    own = {pid_of(engine, number) for number in range(2)}
    processes = [process for each in supervisors(os.getpid()) if each.pid in own for process in family(each)]
    assert len(processes) >= 4
    engine.close()
    assert_gone(processes, set())


def test_a_server_whose_port_is_taken_ends_the_run_with_its_own_words(
    fitted_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(ROOT / "tests" / "tiny.yaml", KEYS)
    policy = load_policy(recipe.model, fitted_tokenizer, seed=3)
    options: dict[str, Any] = {"directory": tmp_path, "check_stop": lambda: None, "say": lambda _: None}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(one_process, "free_port", lambda _: taken.getsockname()[1])
        monkeypatch.setattr(one_server, "_ANSWER_SECONDS", 1.0)  # whoever has the port answers nothing
        with pytest.raises(UserError, match=r"it has ended while it started\n(.|\n)*Address already in use"):
            server_engine(recipe, policy, longest_sequence=420, **options)


def tokens(groups: tuple[Group, ...]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def first_call(act: Callable[[], object]) -> Callable[[], None]:
    """A function that acts when it is called for the first time: soon after the requests are sent."""
    calls = count(1)
    return lambda: act() if next(calls) == 1 else None  # type: ignore[return-value]


def pid_of(engine: ServerEngine, number: int) -> int:
    """Of the supervisor of a server."""
    process = engine._fleet.servers[number].process
    assert isinstance(process, one_process.ServerProcess)
    return process._supervisor.pid
