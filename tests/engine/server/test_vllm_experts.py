"""A real vLLM server of a mixture of experts, whose packed experts are the easiest to keep by mistake."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.engine.server.real import EXPERTS, SHAPE, engine_of, running_server

from gspo.engine.server.engine import ServerEngine
from gspo.errors import RunError
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Group, Query

SETTINGS = RolloutConfig(max_new_tokens=12, group_size=4)


def largest_gap(policy: Policy, groups: Sequence[Group]) -> float:
    samples = [sample for group in groups for sample in group.samples]
    sequences = [TokenSequence(prompt_ids=own.query.prompt_ids, response_ids=own.token_ids) for own in samples]
    with torch.no_grad():
        expected = response_likelihood(policy, sequences).logprobs
    return float((torch.cat([sample.sampler_logprobs for sample in samples]) - expected).abs().max())


def test_every_publish_replaces_the_experts_too(
    new_policy: Callable[..., Policy],
    query_of: Callable[..., Query],
    home: Path,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = new_policy("qwen3_moe", **SHAPE, **EXPERTS)
    queries = [query_of([4, 5, 6], 0), query_of([7, 3], 1)]
    with running_server(policy, home) as server:
        engine = engine_of(policy, home, urls=(server.url,))
        sampler, texts = Sampler(engine, policy), set()
        for version in range(3):
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.1)
            sampler.publish(version)
            groups = sampler.sample(queries, SETTINGS, SamplingKey(seed=0, step=1))
            assert largest_gap(policy, groups) < 1e-5
            texts.add(str([sample.token_ids.tolist() for group in groups for sample in group.samples]))
        assert len(texts) == 3
        _keeps_old_weights(engine, monkeypatch)
        for version, (name, parameter) in enumerate(policy.model.named_parameters(), start=3):
            was = parameter.detach().clone()
            with torch.no_grad():
                parameter.copy_(0.9 * parameter.flip(0))
            with pytest.raises(RunError, match="does not have the policy's weights"):
                engine.publish(version)
            assert version > 3 or name
            with torch.no_grad():
                parameter.copy_(was)


def _keeps_old_weights(engine: ServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the server is told of new weights, and given none."""
    api = engine._fleet.servers[0].api
    publish = api.publish
    monkeypatch.setattr(
        api, "publish", lambda *given: [own for own in publish(*given) if own.path != "/collective_rpc"]
    )
