"""The log ratio of each token that the update saw: 0 in π_old's own pass, the sequence ratio's logarithm on average."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.samples import Step, advantaged, learner_of, sequences_of, updates, with_old
from tests.sampling import sample_groups

from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.model.policy import Policy
from gspo.recipe.sections import OptimizerConfig, RolloutConfig
from gspo.types import Batch, SequenceStats

NewPolicy = Callable[..., Policy]
CUTS = [1, 40, 10**6]  # tokens a micro-batch
LEVELS = ["sequence", "sequence_token", "token"]


def sampled(policy: Policy, query_of: Any, seed: int = 0) -> Batch:
    """Six groups of four responses, of unequal lengths, of the policy's own."""
    queries = [query_of([4 + n % 5] * (1 + 3 * n), n) for n in range(6)]
    groups = sample_groups(policy, queries, RolloutConfig(max_new_tokens=14), group_size=4, seed=seed, policy_version=0)
    return advantaged(groups, [float((n * 7 + seed) % 5) for n in range(24)])


def updated(policy: Policy, batch: Batch, actor: Any, lr: float = 1e-2) -> Sequence[Step]:
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=lr), total_steps=actor.mini_batches)
    return list(updates(policy, optimizer, batch, actor))


def ratio_of_tokens(item: SequenceStats) -> float:
    """The sequence ratio that its tokens give, in float64."""
    return math.exp(item.log_ratios.double().mean().item())


@pytest.mark.parametrize("micro_batch_tokens", CUTS)
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "float32"), ("qwen3_moe", "float32"), ("gemma2", "float32"), ("qwen3", "bfloat16")]
)
def test_where_the_policy_is_the_old_one_every_log_ratio_is_0_and_nothing_else(
    family: str, dtype: str, micro_batch_tokens: int, new_policy: NewPolicy, query_of: Any, actor_of: Any
) -> None:
    policy = new_policy(family, dtype=dtype)
    actor = actor_of(mini_batches=3, old_logprobs="recompute", micro_batch_tokens=micro_batch_tokens)
    first, *later = updated(policy, sampled(policy, query_of), actor)
    assert len(first.trained) >= 4
    assert all(not item.log_ratios.any() for item in first.trained.values())
    assert all(item.log_ratios.any() for report in later for item in report.trained.values() if item.num_tokens > 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("source", ["recompute", "engine"])
def test_the_mean_of_the_log_ratios_is_the_log_of_the_sequence_ratio_in_every_mini_batch(
    source: str, level: str, seed: int, new_policy: NewPolicy, query_of: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe" if seed % 2 else "qwen3")
    actor = actor_of(
        mini_batches=3, old_logprobs=source, importance_sampling_level=level, micro_batch_tokens=CUTS[seed % 3]
    )
    reports = updated(policy, sampled(policy, query_of, seed), actor)
    assert all(report.trained for report in reports)
    furthest = 0.0
    for item in (item for report in reports for item in report.trained.values()):
        assert item.log_ratios.shape == (item.num_tokens,) == item.old_logprobs.shape
        assert ratio_of_tokens(item) == pytest.approx(item.sequence_ratio, rel=2e-6)
        assert item.ratio_sum == pytest.approx(item.log_ratios.double().exp().sum().item(), rel=1e-5)
        furthest = max(furthest, abs(item.sequence_ratio - 1))
    assert furthest > 1e-3  # the policy has moved


def test_the_log_ratios_are_the_policys_own_likelihoods_against_the_old_ones(
    new_policy: NewPolicy, batch_of: Any, actor_of: Any, plain_logprobs: Any
) -> None:
    policy = new_policy()
    batch = batch_of([[1.0, 0.0, 0.5], [0.0, 2.0]], vocabulary=len(policy.tokenizer))
    sequences, generator = sequences_of(batch), torch.Generator().manual_seed(0)
    old = {index: torch.randn(len(s.response_ids), generator=generator) - 3 for index, s in enumerate(sequences)}
    with torch.no_grad():
        now = plain_logprobs(policy, sequences).split([len(sequence.response_ids) for sequence in sequences])
    optimizer = Optimizer(policy.model, OptimizerConfig(), total_steps=1)
    (step,) = updates(policy, optimizer, with_old(batch, old), actor_of())
    assert list(step.trained) == [0, 1, 3, 4]
    for index, stats in step.trained.items():
        torch.testing.assert_close(stats.log_ratios, now[index] - old[index], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2"])
def test_the_log_ratios_do_not_depend_on_the_cut_into_micro_batches(
    family: str, new_policy: NewPolicy, query_of: Any, actor_of: Any
) -> None:
    seen: list[dict[int, torch.Tensor]] = []
    batch = sampled(new_policy(family), query_of)
    for micro_batch_tokens in CUTS:
        policy = new_policy(family)
        actor = actor_of(mini_batches=2, old_logprobs="engine", micro_batch_tokens=micro_batch_tokens)
        reports = updated(policy, batch, actor, lr=1e-4)  # so small that the steps' own rounding does not show
        seen.append({index: own.log_ratios for report in reports for index, own in report.trained.items()})
    one, *others = seen
    assert len(one) >= 12 and max(values.abs().max() for values in one.values()) > 1e-4
    for other in others:
        assert other.keys() == one.keys()
        for index, values in one.items():
            torch.testing.assert_close(other[index], values, rtol=0, atol=2e-5)


def test_what_is_kept_of_a_sequence_does_not_hold_its_mini_batch_in_memory(
    new_policy: NewPolicy, query_of: Any, actor_of: Any
) -> None:
    policy = new_policy()
    for report in updated(policy, sampled(policy, query_of), actor_of(mini_batches=2)):
        for item in report.trained.values():
            assert item.log_ratios.untyped_storage().nbytes() == 4 * item.num_tokens
            assert not item.log_ratios.requires_grad and item.log_ratios.device.type == "cpu"
