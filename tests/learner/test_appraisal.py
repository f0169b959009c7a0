"""What a reference and a critic say of the rollouts: of those that are scored, at the temperature of sampling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sampling import sample_groups

from gspo.learner.appraisal import appraise
from gspo.learner.critic import Critic
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.schema import CriticConfig, RolloutConfig
from gspo.types import Appraisal, Group, Score

NewPolicy = Callable[..., Policy]
REWARDS = [1.0, None, 0.0, 1.0, None, None, None, None, 0.5, 1.0, 0.0, None]


@pytest.fixture
def groups(new_policy: NewPolicy, query_of: Any) -> tuple[Group, ...]:
    queries = [query_of(prompt, number) for number, prompt in enumerate([[4, 5, 6], [7], [3, 9, 8, 4, 5, 5, 10]])]
    sampling = RolloutConfig(max_new_tokens=9, temperature=0.7)
    return sample_groups(new_policy(), queries, sampling, group_size=4, seed=0, policy_version=0)


def appraised(groups: tuple[Group, ...], actor: Any, rewards: list[float | None] = REWARDS, **models: Any) -> Appraisal:
    scores = [Score(reward=reward, parts={}) for reward in rewards]
    return appraise(groups, scores, actor, **{"reference": None, "critic": None, **models}, temperature=0.7)


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 10**6])
@pytest.mark.parametrize("gradient_noise", [True, False])
def test_a_reference_that_is_the_policy_says_what_the_sampler_said_of_every_scored_rollout(
    micro_batch_tokens: int, gradient_noise: bool, groups: Any, new_policy: NewPolicy, actor_of: Any
) -> None:
    actor = actor_of(micro_batch_tokens=micro_batch_tokens, gradient_noise=gradient_noise)
    found = appraised(groups, actor, policy=new_policy(), reference=new_policy())
    assert found.values == {}
    assert list(found.reference_logprobs) == [index for index, reward in enumerate(REWARDS) if reward is not None]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for index, logprobs in found.reference_logprobs.items():
        torch.testing.assert_close(logprobs, rollouts[index].sampler_logprobs, rtol=0, atol=1e-5)
        assert not logprobs.requires_grad


def test_another_reference_says_its_own(groups: Any, new_policy: NewPolicy, actor_of: Any, plain_logprobs: Any) -> None:
    other = new_policy("llama", seed=3)
    found = appraised(groups, actor_of(), policy=new_policy(), reference=other).reference_logprobs
    rollouts = [(group.query.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
    for index, logprobs in found.items():
        prompt, rollout = rollouts[index]
        alone = TokenSequence(prompt_ids=prompt, response_ids=rollout.response_ids)
        with torch.no_grad():
            torch.testing.assert_close(logprobs, plain_logprobs(other, [alone], 0.7), rtol=0, atol=1e-5)
        assert (logprobs - rollout.sampler_logprobs).abs().max() > 1e-2


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_unscored_rollouts_cost_nothing(
    trunk: Any, groups: Any, new_policy: NewPolicy, actor_of: Any, tokens_read: Any
) -> None:
    policy, reference, own = new_policy(), new_policy(), new_policy() if trunk == "own" else None
    critic = Critic(CriticConfig(trunk=trunk), policy, own, total_steps=1)
    read = {"reference": tokens_read(reference), "values": tokens_read(own or policy)}
    models: dict[str, Any] = {"policy": policy, "reference": reference, "critic": critic}
    nothing = appraised(groups, actor_of(), [None] * 12, **models)
    assert nothing.values == nothing.reference_logprobs == {} and not any(read.values())
    actor = actor_of(micro_batch_tokens=1)
    found = appraised(groups, actor, **models)
    lengths = [
        len(group.query.prompt_ids) + len(rollout.response_ids) - 1 for group in groups for rollout in group.rollouts
    ]
    scored = [index for index, reward in enumerate(REWARDS) if reward is not None]
    assert list(found.values) == list(found.reference_logprobs) == scored
    for shapes in read.values():
        assert shapes == [(1, lengths[index]) for index in scored]


def test_without_models_there_is_no_pass(groups: Any, new_policy: NewPolicy, actor_of: Any, tokens_read: Any) -> None:
    policy = new_policy()
    shapes = tokens_read(policy)
    found = appraised(groups, actor_of(), policy=policy)
    assert shapes == [] and found.values == found.reference_logprobs == {}
