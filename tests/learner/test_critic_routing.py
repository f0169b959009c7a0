"""A value model beside replayed experts: its own routers choose for themselves, a shared trunk's replay as trained."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sampling import sample_groups

from gspo.learner.appraisal import appraise
from gspo.learner.critic import Critic
from gspo.model.likelihood import response_likelihood, response_states
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.schema import CriticConfig, RolloutConfig
from gspo.types import Experts, Group, Score

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

    return tuple(
        replace(group, rollouts=tuple(replace(one, experts=elsewhere(one.experts)) for one in group.rollouts))
        for group in sampled
    )


def sequences_of(groups: tuple[Group, ...], *, replayed: bool) -> list[TokenSequence]:
    return [
        TokenSequence(
            prompt_ids=group.query.prompt_ids,
            response_ids=one.response_ids,
            experts=one.experts if replayed else None,
        )
        for group in groups
        for one in group.rollouts
    ]


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
    scores = [Score(reward=1.0, parts={})] * 6
    found = appraise(groups, scores, actor, policy=policy, reference=None, critic=critic, temperature=1.0)
    values = {}
    with torch.no_grad():
        for replayed in (True, False):
            sequences = sequences_of(groups, replayed=replayed)
            values[replayed] = critic.values(sequences, response_states(policy, sequences).hidden)
    assert (values[True] - values[False]).abs().max() > 1e-2
    torch.testing.assert_close(torch.cat([found.values[index] for index in range(6)]), values[replay == "engine"])


def test_a_reference_chooses_its_experts_itself(new_policy: NewPolicy, actor_of: Any, groups: Any) -> None:
    policy, reference = new_policy("qwen3_moe"), new_policy("qwen3_moe", seed=5)
    actor, scores = actor_of(routing_replay="engine"), [Score(reward=1.0, parts={})] * 6
    found = appraise(groups, scores, actor, policy=policy, reference=reference, critic=None, temperature=1.0)
    with torch.no_grad():
        expected = response_likelihood(reference, sequences_of(groups, replayed=False)).logprobs
    torch.testing.assert_close(torch.cat([found.reference_logprobs[index] for index in range(6)]), expected)
