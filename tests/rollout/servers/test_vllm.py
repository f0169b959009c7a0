"""A real vLLM server of a dense model: what it samples, the weights that it is given, and every way in which it fails.

One server for all of them, for its start takes longer than all that is asked of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rollout.servers.fault_proxy import (
    Fault,
    Proxy,
    answering,
    asking,
    changing,
    drop,
    hang,
    truncate,
)
from tests.rollout.servers.real import SHAPE, RunningServer, engine_of, running_server

from gspo.errors import DivergedError, RunError, UserError
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.engine import Engine, SamplingKey
from gspo.rollout.servers import server as one_server
from gspo.rollout.servers.engine import ServerEngine
from gspo.types import Group, Query, Sample

NewPolicy = Callable[..., Policy]
SETTINGS = RolloutConfig(max_new_tokens=12, group_size=3)
KEY = SamplingKey(seed=0, step=1)
TOLERANCE = 1e-5  # nats a token, in float32


@pytest.fixture(scope="module")
def server(new_policy: NewPolicy, home: Path) -> Iterator[RunningServer]:
    with running_server(new_policy(**SHAPE), home) as server:
        yield server


@pytest.fixture
def proxy(server: RunningServer) -> Iterator[Proxy]:
    proxy = Proxy(server.url)
    yield proxy
    proxy.close()


@pytest.fixture
def policy(new_policy: NewPolicy) -> Policy:
    return new_policy(**SHAPE)


@pytest.fixture
def new_engine(policy: Policy, proxy: Proxy, key: str, tmp_path: Path) -> Callable[..., ServerEngine]:
    """An engine whose server is behind the proxy; it has the policy's weights as version 0."""

    def build(**vllm: Any) -> ServerEngine:
        engine = engine_of(policy, tmp_path, **{"urls": (proxy.url,), **vllm})
        engine.publish(policy, 0)
        return engine

    return build


@pytest.fixture
def queries(query_of: Callable[..., Query]) -> list[Query]:
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
    new_engine: Callable[..., ServerEngine], policy: Policy, queries: list[Query], proxy: Proxy
) -> None:
    engine = new_engine()
    shown: list[tuple[int, int, str]] = []
    groups = engine.sample(queries, SETTINGS, KEY, show_progress=lambda *count: shown.append(count))
    assert isinstance(engine, Engine)
    assert [group.query for group in groups] == queries and [len(group.samples) for group in groups] == [3] * 3
    assert {sample.versions for group in groups for sample in group.samples} <= {((0, n),) for n in range(1, 13)}
    assert (logprobs(groups) - likelihoods(policy, groups)).abs().max() < TOLERANCE
    assert sorted(proxy.groups()) == sorted(query.prompt_ids for query in queries)  # each prompt is read once
    assert engine.sample([], SETTINGS, KEY) == ()
    engine.close()
    engine.close()
