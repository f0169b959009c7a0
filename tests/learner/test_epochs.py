"""Several passes over a batch: ratios and weights by the equation in float64, and what a pass leaves to the next."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.samples import advantaged, learner_of, sequence_of, updates
from tests.sampling import sample_groups

from gspo.learner.clip_range import clipping_scale
from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.micro_batching import trained_samples
from gspo.learner.optimizer import Optimizer
from gspo.metrics.sequences import sequence_metrics, trained_rows
from gspo.metrics.step import expert_metrics
from gspo.model.policy import Policy
from gspo.recipe.sections import OptimizerConfig, RolloutConfig
from gspo.types import Batch

NewPolicy = Callable[..., Policy]
LOW, HIGH, RATE = 0.02, 0.03, 0.1
SGD = OptimizerConfig(name="torch.optim.SGD", lr=RATE, max_grad_norm=1e9)


@pytest.fixture
def batch_from(query_of: Any) -> Callable[[Policy], Batch]:
    def build(policy: Policy) -> Batch:
        queries = [query_of([4 + n] * (1 + 2 * n), n) for n in range(4)]
        groups = sample_groups(policy, queries, RolloutConfig(max_new_tokens=9), group_size=4, seed=0, policy_version=0)
        return advantaged(groups, [float((n * 7) % 5) for n in range(16)])

    return build


def expected_ratios(policy: Policy, batch: Batch, actor: Any, plain_logprobs: Any) -> tuple[list[list[float]], Any]:
    """GSPO's Eq. 6 and 8 in float64, a step of gradient ascent for each mini-batch; the ratios of each, and the model.

    π_old is the model before the first of all steps.
    """
    model = copy.deepcopy(policy.model).double()
    twin = type("Twin", (), {"model": model})
    with torch.no_grad():
        old = [plain_logprobs(twin, [sequence_of(sample)]) for sample in batch.samples]
    size, ratios = len(batch.samples) // actor.mini_batches, []
    for number in range(actor.epochs * actor.mini_batches):
        first = number % actor.mini_batches * size
        total, own = torch.zeros((), dtype=torch.float64), []
        for index in range(first, first + size):
            advantage = batch.samples[index].advantage
            ratio = (plain_logprobs(twin, [sequence_of(batch.samples[index])]) - old[index]).mean().exp()
            total = total + torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            own.append(ratio.item())
        model.zero_grad()
        (-total / size).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * (0 if parameter.grad is None else parameter.grad)
        ratios.append(own)
    return ratios, model


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("source", ["recompute", "engine"])
def test_two_passes_are_those_of_the_equation(
    source: str, mini_batches: int, new_policy: NewPolicy, batch_from: Any, actor_of: Any, plain_logprobs: Any
) -> None:
    policy = new_policy()
    batch = batch_from(policy)
    actor = actor_of(
        epochs=2, mini_batches=mini_batches, micro_batch_tokens=60, clip_low=LOW, clip_high=HIGH, old_logprobs=source
    )
    expected, model = expected_ratios(policy, batch, actor, plain_logprobs)
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    steps = list(updates(policy, Optimizer(policy.model, SGD, total_steps=4), batch, actor))
    assert len(steps) == len(expected) == 2 * mini_batches
    size, num_clipped = 16 // mini_batches, 0
    for number, (step, ratios) in enumerate(zip(steps, expected, strict=True)):
        first = number % mini_batches * size  # the same groups as in the pass before
        assert {*step.trained} <= {*range(first, first + size)}
        assert len(step.trained) == len(trained_samples(batch.groups, actor)) // mini_batches
        for index, stats in step.trained.items():
            assert stats.sequence_ratio == pytest.approx(ratios[index - first], abs=1e-5)
            num_clipped += stats.num_clipped
    later = [stats.sequence_ratio for step in steps[mini_batches:] for stats in step.trained.values()]
    assert max(abs(ratio - 1) for ratio in later) > HIGH and num_clipped > 0
    for found, wanted in zip(policy.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)


def test_what_was_seen_in_each_pass_is_counted(new_policy: NewPolicy, batch_from: Any, actor_of: Any) -> None:
    policy = new_policy()
    actor = actor_of(epochs=3, mini_batches=2, clip_low=LOW, clip_high=HIGH, clip_fraction=0.1)
    batch = compute_old_logprobs(batch_from(policy), learner_of(policy, actor))
    *_, last = updates(policy, Optimizer(policy.model, OptimizerConfig(lr=1e-3), total_steps=6), batch, actor)
    samples = [sample for sample in last.batch.samples if sample.stats is not None]
    for sample in samples:
        first = sample.all_stats[0].mini_batch
        assert [stats.mini_batch for stats in sample.all_stats] == [first, first + 2, first + 4]
        assert len({id(stats) for stats in sample.all_stats}) == 3 and sample.all_stats[-1] is sample.stats
        assert all(stats.old_logprobs.equal(sample.stats.old_logprobs) for stats in sample.all_stats if sample.stats)
    metrics: dict[str, Any] = sequence_metrics(trained_rows(last.batch.samples), 6, actor)
    assert len(metrics["clip/token_fraction_by_mini_batch"]) == 6
    everything = [stats for sample in samples for stats in sample.all_stats]
    clipped, tokens = (sum(getattr(stats, name) for stats in everything) for name in ("num_clipped", "num_tokens"))
    assert metrics["clip/token_fraction"] == pytest.approx(clipped / tokens) and clipped > 0
    # The scale is a quantile over all passes: that fraction of their tokens lies above it.
    scale, above = clipping_scale(actor, last.batch.samples), 0
    for sample in samples:
        for stats in sample.all_stats:
            moved = math.copysign(1, sample.advantage) * (stats.sequence_ratio - 1)
            above += stats.num_tokens * (moved / (HIGH if sample.advantage > 0 else LOW) > scale)
    longest = max(stats.num_tokens for stats in everything)
    assert 0.1 * tokens - longest <= above <= 0.1 * tokens


def test_a_second_pass_shows_what_the_first_has_changed_of_the_routing(
    new_policy: NewPolicy, batch_from: Any, actor_of: Any, tokens_read: Any
) -> None:
    policy = new_policy("qwen3_moe")
    actor = actor_of(epochs=2, mini_batches=1)
    batch = compute_old_logprobs(batch_from(policy), learner_of(policy, actor))
    shapes = tokens_read(policy)
    steps = list(updates(policy, Optimizer(policy.model, OptimizerConfig(lr=1e-1), total_steps=2), batch, actor))
    assert len(shapes) == 2  # no pass but those of the update
    reports = [step.report for step in steps]
    assert all(report.after is None and report.activation is not None for report in reports)
    assert reports[1].activation is not None and reports[1].activation.compared.sum() > 0
    metrics: dict[str, Any] = expert_metrics(steps[-1].batch.samples, reports)
    assert metrics["moe/expert_change_fraction"] > 0


def test_replayed_experts_of_a_second_pass_are_those_of_the_policy_that_sampled(
    new_policy: NewPolicy, batch_from: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe")
    actor = actor_of(epochs=2, mini_batches=2, routing_replay="policy")
    batch = compute_old_logprobs(batch_from(policy), learner_of(policy, actor))
    steps = list(updates(policy, Optimizer(policy.model, OptimizerConfig(lr=1e-1), total_steps=4), batch, actor))
    first, last = steps[0].batch.samples, steps[-1].batch.samples
    kept = [sample.old_experts for sample in first]
    assert all(own is not None for own, sample in zip(kept, first, strict=True) if sample.stats is not None)
    assert [sample.old_experts for sample in last] == kept  # the very ones, whatever the routers choose by then
    single = actor_of(mini_batches=2)
    (step, *_) = updates(policy, Optimizer(policy.model, OptimizerConfig(), total_steps=2), batch_from(policy), single)
    assert all(sample.old_experts is None and sample.old_logprobs is None for sample in step.batch.samples)
