"""What a reference and a critic say of the rollouts: of those that are scored, at the temperature of sampling."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.samples import learner_of, scored, sequence_of, token_advantages_of
from tests.sampling import sample_groups

from gspo.learner.advantages import with_advantages
from gspo.learner.critic import Critic
from gspo.learner.forward_passes import score_with_models
from gspo.model.policy import Policy
from gspo.objective import optimal_token_advantages
from gspo.recipe.sections import CriticConfig, RolloutConfig
from gspo.types import Batch, Group, Sample

NewPolicy = Callable[..., Policy]
REWARDS = [1.0, None, 0.0, 1.0, None, None, None, None, 0.5, 1.0, 0.0, None]


@pytest.fixture
def groups(new_policy: NewPolicy, query_of: Any) -> tuple[Group, ...]:
    queries = [query_of(prompt, number) for number, prompt in enumerate([[4, 5, 6], [7], [3, 9, 8, 4, 5, 5, 10]])]
    sampling = RolloutConfig(max_new_tokens=9, temperature=0.7)
    return sample_groups(new_policy(), queries, sampling, group_size=4, seed=0, policy_version=0)


def appraised(groups: tuple[Group, ...], actor: Any, rewards: list[float | None] = REWARDS, **models: Any) -> Batch:
    batch = scored(groups, rewards)
    models = {"reference": None, "critic": None, "teacher": None, **models}
    learner = learner_of(models.pop("policy"), actor, critic=models["critic"], temperature=0.7)
    return score_with_models(batch, learner, models["reference"], models["teacher"])


def filled(batch: Batch, name: str) -> dict[int, torch.Tensor]:
    """Those of the samples, by their place, that have such values."""
    values = enumerate(getattr(sample, name) for sample in batch.samples)
    return {index: own for index, own in values if own is not None}


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 10**6])
@pytest.mark.parametrize("gradient_noise", [True, False])
def test_a_reference_that_is_the_policy_says_what_the_sampler_said_of_every_scored_rollout(
    micro_batch_tokens: int, gradient_noise: bool, groups: Any, new_policy: NewPolicy, actor_of: Any
) -> None:
    actor = actor_of(micro_batch_tokens=micro_batch_tokens, gradient_noise=gradient_noise)
    found = appraised(groups, actor, policy=new_policy(), reference=new_policy())
    assert filled(found, "values") == {}
    reference = filled(found, "reference_logprobs")
    assert list(reference) == [index for index, reward in enumerate(REWARDS) if reward is not None]
    for index, logprobs in reference.items():
        torch.testing.assert_close(logprobs, found.samples[index].sampler_logprobs, rtol=0, atol=1e-5)
        assert not logprobs.requires_grad


def test_another_reference_says_its_own(groups: Any, new_policy: NewPolicy, actor_of: Any, plain_logprobs: Any) -> None:
    other = new_policy("llama", seed=3)
    found = appraised(groups, actor_of(), policy=new_policy(), reference=other)
    for index, logprobs in filled(found, "reference_logprobs").items():
        sample = found.samples[index]
        with torch.no_grad():
            expected = plain_logprobs(other, [sequence_of(sample)], 0.7)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
        assert (logprobs - sample.sampler_logprobs).abs().max() > 1e-2


@pytest.mark.parametrize("micro_batch_tokens", [1, 10**6])
def test_an_optimal_token_baseline_weighs_by_how_far_each_token_was_from_certain(
    micro_batch_tokens: int, groups: Any, new_policy: NewPolicy, actor_of: Any
) -> None:
    policy, token = new_policy(), {"importance_sampling_level": "sequence_token"}
    actor = actor_of(advantage="optimal_token_baseline", micro_batch_tokens=micro_batch_tokens, **token)
    found = appraised(groups, actor, policy=policy)
    errors = filled(found, "squared_errors")
    assert list(errors) == [index for index, reward in enumerate(REWARDS) if reward is not None]
    for index, own in errors.items():
        sample = found.samples[index]
        ids = torch.cat([torch.tensor(sample.query.prompt_ids), sample.token_ids])
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].double() / 0.7
        chances = logits.softmax(-1)[len(sample.query.prompt_ids) - 1 : -1]
        chosen = chances.gather(-1, sample.token_ids[:, None])[:, 0]
        torch.testing.assert_close(own.double(), 1 - 2 * chosen + chances.square().sum(-1), rtol=0, atol=1e-5)
    samples, of_group = with_advantages(found, actor).samples, [0, 2, 3]  # the scored ones of the first query
    expected = optimal_token_advantages(
        torch.cat([torch.tensor([*[0.0] * (samples[i].num_written - 1), REWARDS[i]]).double() for i in of_group]),
        torch.cat([errors[i] for i in of_group]),
        torch.tensor([samples[i].num_written for i in of_group]),
        torch.zeros(3, dtype=torch.long),
    )
    given = torch.cat([token_advantages_of(samples[i]) for i in of_group])
    torch.testing.assert_close(given, expected.float(), rtol=0, atol=1e-6)
    assert samples[1].advantage == 0 and len(set(given.tolist())) > 3
    with pytest.raises(ValueError, match="squared_errors of each scored sample"):
        with_advantages(scored(groups, REWARDS), actor)


@pytest.mark.parametrize("micro_batch_tokens", [1, 10**6])
def test_a_teacher_says_its_own_of_the_same_tokens_behind_its_own_prompt(
    micro_batch_tokens: int, groups: Any, new_policy: NewPolicy, actor_of: Any, plain_logprobs: Any
) -> None:
    def with_hint(sample: Sample, place: int) -> Sample:
        query = sample.query if place == 1 else replace(sample.query, teacher_ids=(9, 9, 4, *sample.query.prompt_ids))
        return replace(sample, query=query)

    groups = tuple(
        Group(samples=tuple(with_hint(sample, place) for sample in group.samples)) for place, group in enumerate(groups)
    )
    other, actor = new_policy("llama", seed=3), actor_of(micro_batch_tokens=micro_batch_tokens)
    found = appraised(groups, actor, policy=new_policy(), teacher=other)
    assert list(filled(found, "teacher_logprobs")) == [n for n, reward in enumerate(REWARDS) if reward is not None]
    for index, logprobs in filled(found, "teacher_logprobs").items():
        sample = found.samples[index]
        read = replace(sequence_of(sample), prompt_ids=sample.query.teacher_ids or sample.query.prompt_ids)
        with torch.no_grad():
            torch.testing.assert_close(logprobs, plain_logprobs(other, [read], 0.7), rtol=0, atol=1e-5)
        assert sample.query.prompt_ids == groups[index // 4].query.prompt_ids


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_unscored_rollouts_cost_nothing(
    trunk: Any, groups: Any, new_policy: NewPolicy, actor_of: Any, tokens_read: Any
) -> None:
    policy, reference, own = new_policy(), new_policy(), new_policy() if trunk == "own" else None
    critic = Critic(CriticConfig(trunk=trunk), policy, own, total_steps=1)
    read = {"reference": tokens_read(reference), "values": tokens_read(own or policy)}
    models: dict[str, Any] = {"policy": policy, "reference": reference, "critic": critic}
    nothing = appraised(groups, actor_of(), [None] * 12, **models)
    assert filled(nothing, "values") == filled(nothing, "reference_logprobs") == {} and not any(read.values())
    actor = actor_of(micro_batch_tokens=1)
    found = appraised(groups, actor, **models)
    lengths = [sequence_of(sample).num_tokens - 1 for sample in found.samples]
    with_reward = [index for index, reward in enumerate(REWARDS) if reward is not None]
    assert list(filled(found, "values")) == list(filled(found, "reference_logprobs")) == with_reward
    for shapes in read.values():
        assert shapes == [(1, lengths[index]) for index in with_reward]


def test_without_models_there_is_no_pass(groups: Any, new_policy: NewPolicy, actor_of: Any, tokens_read: Any) -> None:
    policy = new_policy()
    shapes = tokens_read(policy)
    found = appraised(groups, actor_of(), policy=policy)
    assert shapes == [] and filled(found, "values") == filled(found, "reference_logprobs") == {}
