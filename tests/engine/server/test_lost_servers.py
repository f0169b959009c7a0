"""A run's own servers that die, hang or fail: each is started anew, and what it has lost is sampled again.

What looks after servers is the same for vLLM's, whose start takes a hundred times as long.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from tests.engine.server import small_server
from tests.engine.server.real import SHAPE, engine_of
from tests.engine.server.small_server import ASKED, digest_of, logprob_of
from tests.engine.server.test_vllm_process import LONG, assert_gone, family, supervisors

from gspo.engine.engine import Completion, LostError, Prompt, Sampling
from gspo.engine.server import fleet, hosts
from gspo.engine.server import server as one_server
from gspo.engine.server.engine import ServerEngine
from gspo.engine.server.probe import Gap, Probe
from gspo.engine.server.weights import weight_files
from gspo.errors import RunError, UserError
from gspo.model.linear import LIMITS
from gspo.model.policy import Policy
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Group, Query

KEY = SamplingKey(seed=0, step=1)
SHORT = LONG.model_copy(update={"max_new_tokens": 12, "group_size": 3})
PROMPTS = [Prompt(ids=ids, key=key, max_new_tokens=12) for ids in ((4, 5, 6), (7,)) for key in (1, 2, 3)]


class DigestProbe(Probe):
    """The proof of small servers: their tokens' log-likelihoods are of the policy's digest."""

    def gap(self, completions: Sequence[Completion]) -> Gap:
        with weight_files(self._policy) as paths:
            expected = logprob_of(digest_of(paths))
        gaps = [abs(number - expected) for own in completions for number in own.logprobs.tolist()]
        return Gap(mean=sum(gaps) / len(gaps), most=max(gaps), tolerance=self._tolerance)


@pytest.fixture
def policy(new_policy: Callable[..., Policy]) -> Policy:
    return new_policy(**SHAPE)


@pytest.fixture
def engine(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerEngine]:
    """Of two small servers in place of vLLM's, with the policy's weights as version 5; in the end none is left."""
    monkeypatch.setattr("gspo.engine.make.Probe", DigestProbe)
    # A server that is stopped takes connections and answers none.
    monkeypatch.setattr(one_server, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(one_server, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(fleet, "_END_SECONDS", 0.5)
    devices = ("0", "1")
    engine = engine_of(policy, tmp_path, longest_prompt=300, python=interpreter(tmp_path), devices=devices)
    engine.publish(5)
    yield engine
    processes = [process for number in range(2) for process in family(supervisor_of(engine, number))]
    assert len(processes) == 4
    engine.close()
    assert_gone(processes, set())


def interpreter(directory: Path) -> str:
    """One whose vLLM is small."""
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{small_server.__file__}" "$@"\n')
    python.chmod(0o700)
    return str(python)


@pytest.fixture
def sampler(engine: ServerEngine, policy: Policy) -> Sampler:
    sampler = Sampler(engine, policy)
    sampler.publish(5)
    return sampler


@pytest.fixture
def queries(query_of: Callable[..., Query]) -> list[Query]:
    return [query_of([4, 5, 6], 0), query_of([7], 1), query_of([3, 9, 8, 4, 5], 2)]


def tokens(groups: Sequence[Group]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def supervisor_of(engine: ServerEngine, number: int) -> psutil.Process:
    process = engine._fleet.servers[number].process
    assert isinstance(process, hosts.ServerProcess)
    return psutil.Process(process._supervisor.pid)


class Held:
    """No server answers a group, until each has been asked for one: then something happens."""

    def __init__(self, directory: Path, act: Callable[[], object]) -> None:
        self._hold, self._act = directory / "hold", act
        self._logs = [directory / f"vllm_{number}.log" for number in range(2)]
        self._before = self._num_asked()
        self._hold.touch()

    def _num_asked(self) -> list[int]:
        return [log.read_text().count(ASKED) for log in self._logs]

    def __call__(self, *_: object) -> None:
        pairs = zip(self._num_asked(), self._before, strict=True)
        if self._hold.exists() and all(now > before for now, before in pairs):
            self._act()
            self._hold.unlink()

    def wait(self) -> None:
        """Until it has happened."""
        while self._hold.exists():
            self()
            time.sleep(0.01)


@pytest.mark.parametrize(("number", "end"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_server_that_dies_or_hangs_in_mid_request_is_started_again_and_nothing_else_changes(
    number: int, end: int, sampler: Sampler, engine: ServerEngine, queries: list[Query], tmp_path: Path
) -> None:
    expected = sampler.sample(queries, LONG, KEY)
    supervisor = supervisor_of(engine, number)
    (server,), processes = supervisor.children(), family(supervisor)
    stay = family(supervisor_of(engine, 1 - number))
    groups = sampler.sample(queries, LONG, KEY, show_progress=Held(tmp_path, partial(server.send_signal, end)))
    assert tokens(groups) == tokens(expected)
    assert [sample.versions for group in groups for sample in group.samples] == [((5, 300),)] * 24
    measured = engine.take_metrics()
    assert (measured["engine/retries"], measured["engine/restarts"]) == (1, 1)
    assert_gone(processes, set())
    assert family(supervisor_of(engine, 1 - number)) == stay
    has_ended = "gspo: the server has ended with status" in (tmp_path / f"vllm_{number}.log").read_text()
    assert has_ended == (end == signal.SIGKILL)


@pytest.mark.parametrize("version", [5, 6])
def test_what_a_server_has_under_way_is_lost_with_it_alone_and_publishing_starts_it_anew(
    version: int, engine: ServerEngine, tmp_path: Path
) -> None:
    expected = [future.result() for future in engine.submit(PROMPTS, Sampling())]
    (server,) = supervisor_of(engine, 0).children()
    held = Held(tmp_path, server.kill)
    futures = engine.submit(PROMPTS, Sampling())
    held.wait()
    assert [type(future.exception()) for future in futures] == [LostError] * 3 + [type(None)] * 3
    engine.publish(version)
    measured = engine.take_metrics()
    assert (measured["engine/retries"], measured["engine/restarts"]) == (1, 1)
    for own, again in zip(expected, engine.submit(PROMPTS, Sampling()), strict=True):
        assert again.result().token_ids.tolist() == own.token_ids.tolist()
        assert again.result().versions == ((version, 12),)


def test_a_server_that_dies_while_nothing_is_sampled_is_started_anew_with_the_next_weights(
    engine: ServerEngine, sampler: Sampler, queries: list[Query], policy: Policy
) -> None:
    supervisor = supervisor_of(engine, 1)
    supervisor.children()[0].kill()
    supervisor.wait()
    before = sampler.sample(queries, SHORT, KEY)
    with torch.no_grad():
        next(policy.model.parameters()).add_(0.1)
    sampler.publish(6)
    after = sampler.sample(queries, SHORT, KEY)
    assert tokens(after) != tokens(before)
    assert {sample.versions for group in after for sample in group.samples} == {((6, 12),)}
    assert engine.take_metrics()["engine/restarts"] == 1


def test_servers_that_fail_are_started_anew_the_second_time_and_end_the_run_the_third(
    sampler: Sampler, engine: ServerEngine, queries: list[Query], tmp_path: Path
) -> None:
    (tmp_path / "fail").touch()
    with pytest.raises(RunError, match=rf"no response in 3 attempts: vllm server .*status 500(.|\n)*{ASKED}"):
        sampler.sample(queries, SHORT, KEY)
    measured = engine.take_metrics()
    assert (measured["engine/retries"], measured["engine/restarts"]) == (2, 2)
    (tmp_path / "fail").unlink()
    assert len(sampler.sample(queries, SHORT, KEY)) == 3  # a notebook may go on


def test_a_server_gets_no_limits_that_this_process_has_set_for_itself(engine: ServerEngine) -> None:
    assert os.environ.items() >= LIMITS.items()
    for process in family(supervisor_of(engine, 0)):
        assert not LIMITS.keys() & process.environ().keys()


def test_a_server_whose_port_is_taken_ends_the_run_with_its_own_words(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(hosts, "free_port", lambda _: taken.getsockname()[1])
        monkeypatch.setattr(one_server, "_ANSWER_SECONDS", 1.0)  # whoever has the port answers nothing
        with pytest.raises(UserError, match=r"it has ended while it started\n(.|\n)*Address already in use"):
            engine_of(policy, tmp_path, python=interpreter(tmp_path))
    assert not supervisors(os.getpid())
