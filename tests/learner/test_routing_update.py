"""Whose experts an update uses: those of π_old or of the engine, however far the routers have moved since."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.mixtures import MIXTURES, conditioned, live_experts, replayed_logprobs, sets, turn_routers
from tests.samples import Step, advantaged, learner_of, updates
from tests.sampling import sample_groups

from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.optimizer import StepReport
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import ActorConfig, RolloutConfig
from gspo.types import Batch, Experts

NewPolicy = Callable[..., Policy]
FAMILIES = ["qwen3_moe", "gpt_oss"]  # the one packed, the other padded
TEMPERATURE = 0.8


@pytest.fixture
def turning(recording_optimizer: Any) -> Callable[[Policy], Any]:
    """An optimiser whose steps note the gradient and change the routers so much that they choose other experts."""

    def build(policy: Policy) -> Any:
        class Turning(recording_optimizer):
            def step(self, *, loss_is_finite: bool = True) -> StepReport:
                report: StepReport = super().step(loss_is_finite=loss_is_finite)
                turn_routers(policy, seed=len(self.gradients))
                return report

        return Turning(policy.model)

    return build


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch that a policy sampled; since then its routers may have been turned."""

    policy: Policy
    batch: Batch

    def sequence(self, index: int, experts: Experts | None) -> TokenSequence:
        return conditioned(self.batch.samples[index], experts)

    def recorded(self, index: int) -> Experts:
        """What the engine's routers chose."""
        experts = self.batch.samples[index].experts
        assert experts is not None
        return experts

    def live(self, index: int) -> Experts:
        """What the routers choose as they are now."""
        return live_experts(self.policy, self.sequence(index, None))


@pytest.fixture
def case_of(new_policy: NewPolicy, query_of: Any) -> Callable[..., Case]:
    """Four queries with prompts of unequal length, four responses each, one of them without an advantage."""

    def build(family: str, *, dtype: str = "float32", turned: bool = False) -> Case:
        policy = new_policy(family, dtype, **MIXTURES[family])
        queries = [query_of([4 + n] * (1 + 6 * n), n) for n in range(4)]
        sampling = RolloutConfig(max_new_tokens=7, temperature=TEMPERATURE)
        groups = sample_groups(policy, queries, sampling, group_size=4, seed=0, policy_version=0, record_experts=True)
        rewards = [0.0, 1.0, 2.0, 4.0, 0.0, 0.5, 1.0, 0.5, *[0.0, 0.0, 1.0, 3.0] * 2]
        if turned:  # the engine then is another policy than the trainer's, as one of other kernels is
            turn_routers(policy, seed=7)
        return Case(policy=policy, batch=advantaged(groups, rewards))

    return build


def with_old_policy(case: Case, actor: ActorConfig) -> Batch:
    return compute_old_logprobs(case.batch, learner_of(case.policy, actor, temperature=TEMPERATURE))


def old_logprobs_of(batch: Batch) -> dict[int, torch.Tensor]:
    """Of the samples that have them, by their place."""
    values = enumerate(sample.old_logprobs for sample in batch.samples)
    return {index: own for index, own in values if own is not None}


def ratios(case: Case, experts: dict[int, Experts], old: dict[int, torch.Tensor], plain: Any) -> dict[int, float]:
    """s_i of these rollouts by the policy as it is now, in plain passes under these experts (Eq. 7)."""
    found = {}
    for index, one in experts.items():
        with torch.no_grad():
            now = replayed_logprobs(case.policy, [case.sequence(index, one)], plain, TEMPERATURE)
        found[index] = float((now - old[index]).mean().exp())
    return found


def seen_ratios(step: Step) -> dict[int, float]:
    return {index: stats.sequence_ratio for index, stats in step.trained.items()}


@pytest.mark.parametrize("replay", ["policy", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_later_mini_batches_replay_the_experts_of_the_policy_before_the_first_update(
    family: str, replay: str, case_of: Any, actor_of: Any, turning: Any, plain_logprobs: Any
) -> None:
    case = case_of(family)
    actor = actor_of(mini_batches=2, routing_replay=replay, micro_batch_tokens=40)
    first, second = ([i for i in range(start, start + 8) if case.batch.samples[i].advantage] for start in (0, 8))
    recorded = {index: case.live(index) for index in [*first, *second]}
    with torch.no_grad():
        old_logprobs = {
            index: plain_logprobs(case.policy, [case.sequence(index, None)], TEMPERATURE) for index in recorded
        }
    batch = with_old_policy(case, actor)
    assert list(old_logprobs_of(batch)) == second  # the first mini-batch's own pass is π_old's
    optimizer = turning(case.policy)
    steps = updates(case.policy, optimizer, batch, actor, temperature=TEMPERATURE)
    assert seen_ratios(next(steps)) == dict.fromkeys(first, 1.0)
    # Now the routers have been turned: those of every sequence choose otherwise.
    live = {index: case.live(index) for index in second}
    assert all(sets(live[index]) != sets(recorded[index]) for index in second)
    replayed, unreplayed = (
        ratios(case, {index: experts[index] for index in second}, old_logprobs, plain_logprobs)
        for experts in (recorded, live)
    )
    expected, other = (replayed, unreplayed) if replay == "policy" else (unreplayed, replayed)
    found = seen_ratios(next(steps))
    assert found == pytest.approx(expected, rel=1e-4)
    assert all(abs(other[index] / found[index] - 1) > 1e-3 for index in second)


def test_the_gradient_of_a_later_mini_batch_is_that_under_the_old_policys_experts(
    case_of: Any, actor_of: Any, turning: Any, plain_logprobs: Any, gradient_of: Any
) -> None:
    case = case_of("qwen3_moe")
    actor = actor_of(mini_batches=2, routing_replay="policy", clip_low=0.9, clip_high=10.0)
    second = [index for index in range(8, 16) if case.batch.samples[index].advantage]
    told = [case.sequence(index, case.live(index)) for index in second]
    batch = with_old_policy(case, actor)
    old, optimizer = old_logprobs_of(batch), turning(case.policy)
    list(updates(case.policy, optimizer, batch, actor, temperature=TEMPERATURE))
    turn_routers(case.policy, seed=1)  # as they were after the first step
    loss = torch.zeros(())
    for index, sequence in zip(second, told, strict=True):
        now = replayed_logprobs(case.policy, [sequence], plain_logprobs, TEMPERATURE)
        loss = loss - batch.samples[index].advantage * (now - old[index]).mean().exp() / 8
    loss.backward()
    expected = gradient_of(case.policy.model)
    assert (optimizer.gradients[1] - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("old_logprobs", ["recompute", "engine"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_experts_are_replayed_in_every_mini_batch_and_for_the_old_policy(
    family: str, old_logprobs: str, case_of: Any, actor_of: Any, turning: Any, plain_logprobs: Any
) -> None:
    case = case_of(family, turned=True)
    actor = actor_of(mini_batches=2, routing_replay="engine", old_logprobs=old_logprobs, micro_batch_tokens=40)
    trained = [index for index in range(16) if case.batch.samples[index].advantage]
    recorded = {index: case.recorded(index) for index in trained}
    assert all(sets(case.live(index)) != sets(recorded[index]) for index in trained)
    batch = with_old_policy(case, actor)
    old = old_logprobs_of(batch)
    expected = {index: batch.samples[index].sampler_logprobs for index in trained}
    if old_logprobs == "recompute":
        sequences = {index: case.sequence(index, recorded[index]) for index in trained}
        with torch.no_grad():
            expected = {
                index: replayed_logprobs(case.policy, [one], plain_logprobs, TEMPERATURE)
                for index, one in sequences.items()
            }
    for index, logprobs in old.items():
        torch.testing.assert_close(logprobs, expected[index], rtol=0, atol=1e-5)
    assert sorted(old) == (trained if old_logprobs == "engine" else [index for index in trained if index >= 8])
    steps = updates(case.policy, turning(case.policy), batch, actor, temperature=TEMPERATURE)
    for start in (0, 8):
        members = [index for index in trained if start <= index < start + 8]
        told = {index: recorded[index] for index in members}
        by_hand = ratios(case, told, expected, plain_logprobs)
        assert seen_ratios(next(steps)) == pytest.approx(by_hand, rel=1e-4)
        assert start == 0 or all(abs(ratio - 1) > 1e-3 for ratio in by_hand.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_log_likelihoods_may_go_with_the_trainers_experts(
    family: str, case_of: Any, actor_of: Any, turning: Any, plain_logprobs: Any
) -> None:
    case = case_of(family, turned=True)
    actor = actor_of(mini_batches=2, routing_replay="policy", old_logprobs="engine", micro_batch_tokens=40)
    trained = [index for index in range(16) if case.batch.samples[index].advantage]
    sampler = {index: case.batch.samples[index].sampler_logprobs for index in trained}
    own = {index: case.live(index) for index in trained}
    batch = with_old_policy(case, actor)
    assert list(old_logprobs_of(batch)) == trained
    for index, logprobs in old_logprobs_of(batch).items():
        assert torch.equal(logprobs, sampler[index])
        experts = batch.samples[index].old_experts
        assert (experts is not None) == (index >= 8) and sets(own[index]) != sets(case.recorded(index))
        assert experts is None or sets(experts) == sets(own[index])
    steps = updates(case.policy, turning(case.policy), batch, actor, temperature=TEMPERATURE)
    for start in (0, 8):  # the first: the trainer's experts, as they are; the second: as they were
        part = {index: own[index] for index in trained if start <= index < start + 8}
        by_hand = ratios(case, part, sampler, plain_logprobs)
        assert seen_ratios(next(steps)) == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("replay", ["policy", "engine"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_until_a_step_is_made_every_ratio_is_exactly_one(
    family: str, replay: str, dtype: str, case_of: Any, actor_of: Any, recording_optimizer: Any
) -> None:
    case = case_of(family, dtype=dtype, turned=replay == "engine")
    optimizer = recording_optimizer(case.policy.model)
    actor = actor_of(mini_batches=4, routing_replay=replay, micro_batch_tokens=60)
    batch = with_old_policy(case, actor)
    steps = list(updates(case.policy, optimizer, batch, actor, temperature=TEMPERATURE))
    assert {ratio for step in steps for ratio in seen_ratios(step).values()} == {1.0}
    assert [len(step.trained) for step in steps] == [4, 2, 3, 3]


def test_what_is_not_replayed_is_not_recorded_by_the_engine_in_vain(actor_of: Any) -> None:
    wants = {
        (replay, old): actor_of(routing_replay=replay, old_logprobs=old).wants_engine_experts
        for replay in ("none", "policy", "engine")
        for old in ("recompute", "engine")
    }
    assert [settings for settings, wanted in wants.items() if not wanted] == [
        ("none", "recompute"),
        ("policy", "recompute"),
    ]
