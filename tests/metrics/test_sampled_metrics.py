"""Dynamic sampling and masks: rewards are those of all that was sampled, not of what was chosen to be trained on."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.report.steps import SECONDS, batch, metrics, report

from gspo.types import Batch, Failure, Group, Score


def judged(lengths: Sequence[int], rewards: Sequence[float | None], *, failed: int = 0) -> Group:
    """A group that was sampled and dropped; the first `failed` of its scores failed."""
    failure = Failure(kind="raised", message="f")
    scores = tuple(
        Score(
            reward=None if place < failed else reward,
            parts={"f": reward, "g": 2.0},
            failure=failure if place < failed else None,
        )
        for place, reward in enumerate(rewards)
    )
    return batch([lengths], [rewards], scores=scores).groups[0]


def chosen() -> Batch:
    """Two groups are kept, one of them of equal rewards; three are dropped, one of them of differing rewards."""
    dropped = (judged([1, 9], [1.0, 1.0]), judged([5, 5], [0.0, 1.0]), judged([3, 3], [1.0, None], failed=1))
    scores = tuple(Score(reward=reward, parts={"f": reward, "g": 1.0}) for reward in (1.0, 0.0, 0.5, 0.5))
    return batch([[2, 4], [6, 10]], [[0.0, 0.0]] * 2, scores=scores, dropped=dropped)


def test_rewards_and_failures_are_of_all_that_was_sampled() -> None:
    line = metrics(chosen(), report())
    rewards = [1.0, 0.0, 0.5, 0.5, 1.0, 1.0, 0.0, 1.0]
    assert line["reward/mean"] == pytest.approx(sum(rewards) / 8)
    assert line["reward/std"] == pytest.approx(statistics.stdev(rewards))
    assert line["reward/unscored_fraction"] == pytest.approx(2 / 10)
    assert line["reward/masked_fraction"] == 1 / 10 and line["reward/raised_rollouts"] == 1
    assert line["reward/g/mean"] == pytest.approx((4 * 1.0 + 6 * 2.0) / 10)


def test_how_far_q_is_from_pi_is_of_all_sampled_tokens_and_only_where_they_differ() -> None:
    plain = chosen()
    assert not any(name.startswith("sampling/") for name in metrics(plain, report()))
    kept = (0.9, 0.8, 1.0)  # π/q of the tokens of each group
    groups = []
    for group, mass in zip((*plain.groups, *plain.dropped[:1]), kept, strict=True):
        full = [s.sampler_logprobs + math.log(mass) for s in group.samples]
        pairs = zip(group.samples, full, strict=True)
        groups.append(Group(samples=tuple(replace(s, full_logprobs=own) for s, own in pairs)))
    line = metrics(replace(plain, groups=tuple(groups[:2]), dropped=tuple(groups[2:])), report())
    counts = (2 + 4, 6 + 10, 1 + 9)
    weights = [mass for mass, count in zip(kept, counts, strict=True) for _ in range(count)]
    assert line["sampling/kept_mass"] == pytest.approx(sum(weights) / 32, rel=1e-6)
    effective = sum(weights) ** 2 / (32 * sum(weight**2 for weight in weights))
    assert line["sampling/effective_fraction"] == pytest.approx(effective, rel=1e-6)


def test_groups_of_equal_rewards_are_counted_among_all_sampled_ones() -> None:
    line = metrics(chosen(), report())
    assert line["group/sampled"] == 5
    assert line["group/zero_variance_fraction"] == pytest.approx(3 / 5)


def test_responses_and_throughput_are_of_all_that_was_sampled() -> None:
    line = metrics(chosen(), report())
    tokens = 2 + 4 + 6 + 10 + 10 + 10 + 6
    assert line["response/mean_tokens"] == tokens / 10
    assert line["response/truncated_fraction"] == 2 / 10  # those of 9 tokens and more
    assert line["throughput/generated_tokens_per_second"] == tokens / SECONDS["rollout"]


def test_tokens_with_rewards_of_their_own_make_equal_rewards_a_signal_and_a_value_model_does_not() -> None:
    by_token = {2: torch.tensor([0.0, 1.0, 2.0]), 3: torch.ones(3), 4: torch.ones(3), 5: torch.ones(3)}
    scores = tuple(Score(reward=1.0, parts={"f": 1.0}, token_rewards=by_token.get(index)) for index in range(6))
    told_apart = dict.fromkeys(range(6), torch.tensor([0.5, 0.0, -0.5]))
    made = batch([[3, 3]] * 3, [[1.0, 1.0]] * 3, scores=scores, token_advantages=told_apart)
    assert metrics(made, report())["group/zero_variance_fraction"] == pytest.approx(2 / 3)


def test_a_dropped_group_does_not_take_the_advantages_of_others() -> None:
    made = batch([[3, 3]], [[1.0, 0.0]], token_advantages={0: torch.ones(3)}, dropped=(judged([3, 3], [1.0, 1.0]),))
    assert metrics(made, report())["group/zero_variance_fraction"] == 0.5


def test_the_responses_that_the_loss_leaves_out_are_counted_in_the_batch() -> None:
    made = batch(
        [[2, 4], [6, 10]], [[1.0, 0.0]] * 2, masked=[False] * 3 + [True], dropped=(judged([5, 5], [0.0, 0.0]),)
    )
    assert metrics(made, report())["response/masked_fraction"] == 1 / 4
