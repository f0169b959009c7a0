"""A value model beside replayed experts: its own routers choose for themselves, a shared trunk's replay as trained."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.samples import learner_of, regrouped, scored, sequence_of
from tests.sampling import sample_groups

from gspo.learner.critic import Critic
from gspo.learner.forward_passes import score_with_models
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood, response_states
from gspo.recipe.sections import CriticConfig, RolloutConfig
from gspo.types import Experts, Group

NewPolicy = Callable[..., Policy]


@pytest.fixture
def groups(new_policy: NewPolicy, query_of: Any) -> tuple[Group, ...]:
    """Of an engine that has sent every token to other experts than the policy would."""
    policy = new_policy("qwen3_moe")
    sampled = sample_groups(
        policy,
        [query_of([4, 5, 6], 0), query_of([7, 8], 1)],
        RolloutConfig(max_new_tokens=6),
        group_size=3,
        seed=0,
        policy_version=0,
        record_experts=True,
    )
    assert policy.routing is not None
    count = policy.routing.num_experts

    def elsewhere(experts: Experts | None) -> Experts:
        assert experts is not None
        return Experts(prefix=(experts.prefix + 1) % count, row=(experts.row + 1) % count)

    samples = [replace(s, experts=elsewhere(s.experts)) for group in sampled for s in group.samples]
    return regrouped(sampled, samples)


def sequences_of(groups: tuple[Group, ...], *, replayed: bool) -> list[TokenSequence]:
    samples = [sample for group in groups for sample in group.samples]
    return [replace(sequence_of(sample), experts=sample.experts if replayed else None) for sample in samples]


def critic_of(policy: Policy, own: Policy | None) -> Critic:
    critic = Critic(CriticConfig(trunk="shared" if own is None else "own"), policy, own, total_steps=1)
    with torch.no_grad():
        critic._head.weight.copy_(torch.randn(critic._head.weight.shape, generator=torch.Generator().manual_seed(0)))
    return critic


def test_a_value_model_of_its_own_takes_no_experts_of_the_policys(new_policy: NewPolicy, groups: Any) -> None:
    policy = new_policy("qwen3_moe")
    critic = critic_of(policy, new_policy("qwen3_moe", seed=5))
    with torch.no_grad():
        told, free = (critic.values(sequences_of(groups, replayed=told), None) for told in (True, False))
    assert torch.equal(told, free)


@pytest.mark.parametrize("replay", ["engine", "none"])
def test_old_values_of_a_shared_trunk_are_of_the_states_that_the_update_reads(
    replay: str, new_policy: NewPolicy, actor_of: Any, groups: Any
) -> None:
    policy = new_policy("qwen3_moe")
    critic, actor = critic_of(policy, None), actor_of(routing_replay=replay)
    found = score_with_models(scored(groups, [1.0] * 6), learner_of(policy, actor, critic=critic), None)
    values = {}
    with torch.no_grad():
        for replayed in (True, False):
            sequences = sequences_of(groups, replayed=replayed)
            values[replayed] = critic.values(sequences, response_states(policy, sequences))
    assert (values[True] - values[False]).abs().max() > 1e-2
    torch.testing.assert_close(
        torch.cat([s.values for s in found.samples if s.values is not None]), values[replay == "engine"]
    )


def test_a_reference_chooses_its_experts_itself(new_policy: NewPolicy, actor_of: Any, groups: Any) -> None:
    policy, reference = new_policy("qwen3_moe"), new_policy("qwen3_moe", seed=5)
    batch, actor = scored(groups, [1.0] * 6), actor_of(routing_replay="engine")
    found = score_with_models(batch, learner_of(policy, actor), reference)
    with torch.no_grad():
        expected = response_likelihood(reference, sequences_of(groups, replayed=False)).logprobs
    own = [s.reference_logprobs for s in found.samples if s.reference_logprobs is not None]
    torch.testing.assert_close(torch.cat(own), expected)
