"""The update: what takes part, what it is divided by, what costs nothing, and which way it moves the policy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.samples import Step, advantaged, changed, learner_of, sequences_of, updates, with_old
from tests.sampling import sample_groups

from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.micro_batching import trained_samples
from gspo.learner.optimizer import Optimizer
from gspo.model.policy import Policy, response_likelihood
from gspo.objective import group_advantages
from gspo.recipe.sections import OptimizerConfig, RolloutConfig
from gspo.types import Batch

NewPolicy = Callable[..., Policy]
WIDE = {"clip_low": 0.5, "clip_high": 0.5}


def updated(policy: Policy, optimizer: Optimizer, batch: Batch, actor: Any) -> list[Step]:
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    return list(updates(policy, optimizer, batch, actor))


def test_groups_of_equal_rewards_cost_no_forward_pass(
    new_policy: NewPolicy, batch_of: Any, actor_of: Any, tokens_read: Any
) -> None:
    policy = new_policy()
    batch = batch_of([[1.0] * 4, [0.1] * 3, [None, None], [0.0, None]], vocabulary=len(policy.tokenizer))
    shapes = tokens_read(policy)
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=1e-2), total_steps=4)
    before = [p.detach().clone() for p in policy.model.parameters()]
    reports = updated(policy, optimizer, batch, actor_of(mini_batches=4))
    assert shapes == []
    assert [step.report.loss for step in reports] == [0.0] * 4
    assert all(step.trained == {} and step.report.num_trained == 0 and step.report.step.applied for step in reports)
    assert all(torch.equal(p, q) for p, q in zip(policy.model.parameters(), before, strict=True))


def test_only_sequences_with_an_advantage_are_read(
    new_policy: NewPolicy, batch_of: Any, actor_of: Any, tokens_read: Any
) -> None:
    policy = new_policy()
    batch = batch_of([[1.0, 1.0, 1.0], [1.0, 0.0, None]], vocabulary=len(policy.tokenizer))
    shapes = tokens_read(policy)
    optimizer = Optimizer(policy.model, OptimizerConfig(), total_steps=1)
    reports = updated(policy, optimizer, batch, actor_of(micro_batch_tokens=1))
    # In their order and once: the update's forward pass of the first mini-batch is π_old's.
    assert shapes == [(1, s.num_tokens - 1) for s in sequences_of(batch)[3:5]]
    assert list(reports[0].trained) == [3, 4]


def gradient_of_update(policy: Policy, recording: Any, batch: Batch, actor: Any) -> torch.Tensor:
    recording.gradients.clear()
    updated(policy, recording(policy.model), batch, actor)
    assert len(recording.gradients) == actor.mini_batches
    return recording.gradients[0]


def expected_gradient(policy: Policy, batch: Batch, denominator: int, plain_logprobs: Any) -> torch.Tensor:
    """Eq. 11 at s = 1: Σ_i Â_i / |y_i| Σ_t ∇ log π, over the denominator."""
    policy.model.zero_grad()
    loss = torch.zeros(())
    for sequence, sample in zip(sequences_of(batch), batch.samples, strict=True):
        if sample.advantage:
            loss = loss - sample.advantage * plain_logprobs(policy, [sequence]).mean() / denominator
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    policy.model.zero_grad()
    return gradient


@pytest.mark.parametrize(
    ("rewards", "denominator"),
    [
        ([[1.0, 0.0, 0.25]], 3),
        ([[1.0, 0.0, 0.25], [0.1, 0.1, 0.1]], 6),  # equal rewards: no gradient, but sequences of the mini-batch
        ([[1.0, 0.0, 0.25, None]], 3),  # not scored: no sequence of the mini-batch
        ([[1.0, 0.0, None], [None, None, None], [1.0, 1.0, None]], 4),
        ([[1.0, 0.5, 0.0]], 3),  # a zero advantage within a varied group counts too
    ],
)
def test_loss_is_divided_by_the_scored_sequences_of_the_mini_batch(
    rewards: list[list[float | None]],
    denominator: int,
    new_policy: NewPolicy,
    batch_of: Any,
    actor_of: Any,
    plain_logprobs: Any,
    recording_optimizer: Any,
) -> None:
    policy = new_policy()
    batch = batch_of(rewards, vocabulary=len(policy.tokenizer))
    expected = expected_gradient(policy, batch, denominator, plain_logprobs)
    found = gradient_of_update(policy, recording_optimizer, batch, actor_of(**WIDE))
    assert (found - expected).norm() / expected.norm() <= 1e-5


def test_each_mini_batch_has_its_own_groups_whole_and_its_own_denominator(
    new_policy: NewPolicy, batch_of: Any, actor_of: Any, plain_logprobs: Any, recording_optimizer: Any
) -> None:
    policy = new_policy()
    rewards = [[1.0, 0.0], [0.0, 0.0, 1.0], [2.0, 0.0, None], [0.3, 0.3]]
    batch = batch_of(rewards, vocabulary=len(policy.tokenizer))
    actor = actor_of(mini_batches=2, micro_batch_tokens=1, **WIDE)
    optimizer = recording_optimizer(policy.model)
    reports = updated(policy, optimizer, batch, actor)
    assert [list(step.trained) for step in reports] == [[0, 1, 2, 3, 4], [5, 6]]
    assert [{stats.mini_batch for stats in step.trained.values()} for step in reports] == [{0}, {1}]
    for gradient, members, denominator in zip(optimizer.gradients, (range(5), range(5, 10)), (5, 4), strict=True):
        part = [sample.advantage if index in members else 0.0 for index, sample in enumerate(batch.samples)]
        expected = expected_gradient(policy, changed(batch, advantage=part), denominator, plain_logprobs)
        assert (gradient - expected).norm() / expected.norm() <= 1e-5


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_old_logprobs_of_engine_and_of_recomputation_agree(
    family: str,
    temperature: float,
    new_policy: NewPolicy,
    query_of: Any,
    actor_of: Any,
    recording_optimizer: Any,
) -> None:
    policy = new_policy(family)
    queries = [query_of(prompt, number) for number, prompt in enumerate([[4, 5, 6], [7], [3, 9, 8, 4, 5, 5, 10]])]
    sampling = RolloutConfig(max_new_tokens=10, temperature=temperature)
    groups = sample_groups(policy, queries, sampling, group_size=4, seed=0, policy_version=0)
    rewards = [float(n % 3) for n in range(12)]
    batch = advantaged(groups, rewards)
    engine = compute_old_logprobs(batch, learner_of(policy, actor_of(old_logprobs="engine"), temperature=temperature))
    trainable = {index for index, s in enumerate(batch.samples) if s in trained_samples(batch.groups, actor_of())}
    assert {index for index, sample in enumerate(engine.samples) if sample.old_logprobs is not None} == trainable
    for micro_batch_tokens in (1, 30, 10**6):
        actor = actor_of(old_logprobs="recompute", micro_batch_tokens=micro_batch_tokens, mini_batches=3)
        recomputed = compute_old_logprobs(batch, learner_of(policy, actor, temperature=temperature))
        own = {index: s.old_logprobs for index, s in enumerate(recomputed.samples) if s.old_logprobs is not None}
        assert own.keys() == {index for index in trainable if index >= 4}  # not of the first mini-batch
        *_, last = updates(policy, recording_optimizer(policy.model), recomputed, actor, temperature=temperature)
        used = {index: s.stats.old_logprobs for index, s in enumerate(last.batch.samples) if s.stats is not None}
        assert used.keys() == trainable
        for index, values in used.items():
            torch.testing.assert_close(values, engine.samples[index].old_logprobs, rtol=0, atol=1e-5)
            if index in own:
                assert torch.equal(values, own[index])


@pytest.mark.parametrize("source", ["recompute", "engine"])
def test_the_first_mini_batch_has_ratio_one_and_later_ones_do_not(
    source: str, new_policy: NewPolicy, query_of: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe")
    queries = [query_of([4, 5, 6 + n], n) for n in range(4)]
    groups = sample_groups(policy, queries, RolloutConfig(max_new_tokens=8), group_size=4, seed=0, policy_version=0)
    batch = advantaged(groups, [float(n % 4) for n in range(16)])
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=1e-2), total_steps=2)
    first, second = updated(policy, optimizer, batch, actor_of(mini_batches=2, old_logprobs=source))
    before, after = list(first.trained.values()), list(second.trained.values())
    assert [stats.sequence_ratio for stats in before] == pytest.approx([1.0] * len(before), abs=1e-5)
    assert sum(stats.num_clipped for stats in before) == 0
    assert max(abs(stats.sequence_ratio - 1) for stats in after) > 1e-3
    assert sum(stats.num_clipped for stats in after) > 0


def test_recomputed_ratios_of_the_first_mini_batch_are_exactly_one_in_bfloat16_too(
    new_policy: NewPolicy, query_of: Any, actor_of: Any, recording_optimizer: Any
) -> None:
    # Other shapes round differently, so π_old must be computed in the same cut as π_θ. No step moves the weights here:
    # the later mini-batches' ratios are exactly one, too.
    policy = new_policy("qwen3", dtype="bfloat16", hidden_size=64, num_hidden_layers=4)
    queries = [query_of([4 + n % 5] * (3 + 5 * n), n) for n in range(8)]
    groups = sample_groups(policy, queries, RolloutConfig(max_new_tokens=40), group_size=4, seed=0, policy_version=0)
    batch = advantaged(groups, [float(n % 4) for n in range(32)])
    actor = actor_of(mini_batches=4, old_logprobs="recompute", micro_batch_tokens=200)
    for step in updated(policy, recording_optimizer(policy.model), batch, actor):
        assert [stats.sequence_ratio for stats in step.trained.values()] == [1.0] * len(step.trained) != []


@pytest.mark.parametrize("level", ["sequence", "sequence_token", "token"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_update_raises_what_was_rewarded_and_lowers_the_rest(
    family: str, level: str, new_policy: NewPolicy, batch_of: Any, actor_of: Any
) -> None:
    policy = new_policy(family)
    batch = batch_of([[1.0, 0.0]], vocabulary=len(policy.tokenizer), seed=3)

    def likelihoods() -> list[float]:
        with torch.no_grad():
            return [float(response_likelihood(policy, [s]).logprobs.sum()) for s in sequences_of(batch)]

    better, worse = likelihoods()
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=1e-3), total_steps=1)
    reports = updated(policy, optimizer, batch, actor_of(importance_sampling_level=level))
    better_after, worse_after = likelihoods()
    assert reports[0].report.step.applied
    assert better_after > better + 1e-3
    assert worse_after < worse - 1e-3


def test_clipped_sequences_do_not_move_the_policy(
    new_policy: NewPolicy, batch_of: Any, actor_of: Any, recording_optimizer: Any
) -> None:
    policy = new_policy()
    batch = batch_of([[1.0, 0.0]], vocabulary=len(policy.tokenizer))
    actor = actor_of(clip_low=0.1, clip_high=0.1)
    with torch.no_grad():
        now = [response_likelihood(policy, [s]).logprobs for s in sequences_of(batch)]
    # π_old gave the good response less and the bad one more than the range allows: both have gone far enough.
    optimizer = recording_optimizer(policy.model)
    (step,) = updates(policy, optimizer, with_old(batch, {0: now[0] - 0.2, 1: now[1] + 0.2}), actor)
    assert not optimizer.gradients[0].any()
    assert all(stats.num_clipped == stats.num_tokens for stats in step.trained.values()) and len(step.trained) == 2


def test_the_temperature_of_the_rollout_is_that_of_the_update(
    new_policy: NewPolicy, batch_of: Any, actor_of: Any, plain_logprobs: Any
) -> None:
    policy = new_policy()
    batch = batch_of([[1.0, 0.0]], vocabulary=len(policy.tokenizer))
    with torch.no_grad():
        expected = plain_logprobs(policy, sequences_of(batch), 0.5)
    batch = compute_old_logprobs(batch, learner_of(policy, actor_of(), temperature=0.5))
    optimizer = Optimizer(policy.model, OptimizerConfig(), total_steps=1)
    (step,) = updates(policy, optimizer, batch, actor_of(), temperature=0.5)
    used = torch.cat([stats.old_logprobs for stats in step.trained.values()])
    torch.testing.assert_close(used, expected, rtol=0, atol=1e-5)
    assert [stats.sequence_ratio for stats in step.trained.values()] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_advantages_of_a_batch_are_normalised_within_each_query_even_of_equal_prompts(batch_of: Any) -> None:
    batch = batch_of([[1.0, 0.0], [5.0, 3.0], [None, 2.0]], vocabulary=20)
    expected = group_advantages(torch.tensor([1.0, 0.0, 5.0, 3.0]), torch.tensor([0, 0, 1, 1])).tolist()
    assert [sample.advantage for sample in batch.samples] == pytest.approx([*expected, 0.0, 0.0])


def test_a_loss_that_is_not_finite_changes_no_weight_and_the_next_mini_batch_goes_on(
    new_policy: NewPolicy, batch_of: Any, actor_of: Any
) -> None:
    policy = new_policy()
    batch = batch_of([[1.0, 0.0], [1.0, 0.0]], vocabulary=len(policy.tokenizer))
    actor = actor_of(mini_batches=2)
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    broken = {s: replace(s, old_logprobs=torch.full((s.num_written,), torch.nan)) for s in batch.groups[0].samples}
    batch = batch.with_changed(broken)
    before = [p.detach().clone() for p in policy.model.parameters()]
    snapshots = []
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=1e-3), total_steps=2)
    step = optimizer.step

    def noting_step(**arguments: Any) -> Any:
        report = step(**arguments)
        snapshots.append([p.detach().clone() for p in policy.model.parameters()])
        return report

    optimizer.step = noting_step  # type: ignore[method-assign]
    steps = updates(policy, optimizer, batch, actor)
    assert [step.report.step.applied for step in steps] == [False, True]
    assert all(torch.equal(p, q) for p, q in zip(snapshots[0], before, strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(snapshots[1], before, strict=True))
    assert all(torch.isfinite(p).all() for p in snapshots[1])
