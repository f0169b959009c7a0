"""What an update computes and what it leaves out: forward passes for π_old, backward passes of what is clipped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.learner.batch import make_batch
from gspo.learner.cutting import cut, trainable_items
from gspo.learner.item import Item, items_of
from gspo.learner.loss import Denominators, denominators_of
from gspo.learner.old_policy import old_policy
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import accumulate_gradient, update
from gspo.model.likelihood import response_likelihood
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.schema import ActorConfig, OptimizerConfig, RolloutConfig
from gspo.rollout.source import sample_groups
from gspo.types import Batch, Score

NewPolicy = Callable[..., Policy]
LEVELS = ["sequence", "sequence_token", "token"]


@pytest.fixture
def sampled_batch(query_of: Any) -> Callable[[Policy], Batch]:
    """Four queries with prompts of unequal length, four responses each, two of which the mean hits in the second."""

    def build(policy: Policy) -> Batch:
        queries = [query_of([4 + n] * (1 + 6 * n), n) for n in range(4)]
        groups = sample_groups(policy, queries, RolloutConfig(max_new_tokens=9), group_size=4, seed=0, policy_version=0)
        rewards = [0.0, 1.0, 2.0, 4.0, 0.0, 0.5, 0.5, 1.0, *[0.0, 0.0, 1.0, 3.0] * 2]
        return make_batch(groups, [Score(reward=reward, parts={}) for reward in rewards])

    return build


def tokens_of(batch: Batch, members: range, actor: ActorConfig) -> list[tuple[int, int]]:
    """The shapes that the trainable sequences have one by one, in their order."""
    return [(1, sequence.num_tokens - 1) for index, sequence in trainable_items(batch, actor) if index in members]


class Waits(TorchDispatchMode):
    """The operations that would wait for a GPU; whole numbers, such as lengths, are read on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.long
        if reads or (func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            self.names.append(str(func))
        return func(*args, **kwargs)


@pytest.mark.parametrize("settings", [{}, {"entropy_bonus": 0.1}, {"surrogate": "gmpo"}, {"surrogate": "cispo"}])
def test_a_micro_batch_waits_for_its_device_once(
    settings: Any, new_policy: NewPolicy, sampled_batch: Any, actor_of: Any
) -> None:
    """There were about twelve waits: now there is the one that tells whether a backward pass is needed."""
    policy = new_policy()
    batch = sampled_batch(policy)
    counts = []
    for tokens in (10**6, 60):
        actor = actor_of(old_logprobs="engine", correction="tis", micro_batch_tokens=tokens, **settings)
        old = old_policy(policy, batch, actor, temperature=1.0)
        items = list(items_of(batch, old, actor).values())
        denominators = denominators_of(batch, range(16), max_tokens=9)
        with Waits() as waits:
            accumulate_gradient(policy, items, actor, denominators, 0, temperature=1.0)
        counts.append(len(waits.names))
        assert len(waits.names) == len(cut(policy, [item.sequence for item in items], actor))
    assert counts[0] == 1 < counts[1]


@pytest.mark.parametrize("mini_batches", [1, 2, 4])
def test_the_first_mini_batch_is_read_once_and_the_others_twice(
    mini_batches: int,
    new_policy: NewPolicy,
    sampled_batch: Any,
    actor_of: Any,
    tokens_read: Any,
    recording_optimizer: Any,
) -> None:
    policy = new_policy()
    batch = sampled_batch(policy)
    assert batch.advantages[5] == batch.advantages[6] == 0
    actor = actor_of(old_logprobs="recompute", mini_batches=mini_batches, micro_batch_tokens=1)
    shapes = tokens_read(policy)
    old = old_policy(policy, batch, actor, temperature=1.0)
    later = tokens_of(batch, range(16 // mini_batches, 16), actor)
    assert shapes == later and len(old) == len(later)
    shapes.clear()
    list(update(policy, recording_optimizer(policy.model), batch, old, actor, temperature=1.0))
    assert shapes == tokens_of(batch, range(16), actor)


def test_the_engines_log_likelihoods_cost_no_pass(
    new_policy: NewPolicy, sampled_batch: Any, actor_of: Any, tokens_read: Any
) -> None:
    policy = new_policy()
    batch = sampled_batch(policy)
    shapes = tokens_read(policy)
    old = old_policy(policy, batch, actor_of(old_logprobs="engine", mini_batches=2), temperature=1.0)
    assert shapes == []
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    assert all(torch.equal(values.logprobs, rollouts[index].sampler_logprobs) for index, values in old.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_ratios_of_recomputed_log_likelihoods_are_exactly_one_until_a_step_is_made(
    level: str, dtype: str, new_policy: NewPolicy, sampled_batch: Any, actor_of: Any, recording_optimizer: Any
) -> None:
    policy = new_policy(dtype=dtype)
    batch, optimizer = sampled_batch(policy), recording_optimizer(policy.model)
    for micro_batch_tokens in (1, 30, 10**6):
        actor = actor_of(mini_batches=2, micro_batch_tokens=micro_batch_tokens, importance_sampling_level=level)
        old = old_policy(policy, batch, actor, temperature=0.7)
        for report in update(policy, optimizer, batch, old, actor, temperature=0.7):
            assert {item.sequence_ratio for item in report.trained} == {1.0}
            assert sum(item.num_clipped for item in report.trained) == 0


def test_an_update_taken_up_makes_the_steps_that_are_left(
    new_policy: NewPolicy, sampled_batch: Any, actor_of: Any
) -> None:
    whole, broken = new_policy("qwen3_moe"), new_policy("qwen3_moe")
    batch, actor = sampled_batch(whole), actor_of(mini_batches=4)
    old = old_policy(whole, batch, actor, temperature=1.0)
    one, two = (Optimizer(policy.model, OptimizerConfig(lr=1e-2), total_steps=4) for policy in (whole, broken))
    expected = list(update(whole, one, batch, old, actor, temperature=1.0))
    begun = update(broken, two, batch, old, actor, temperature=1.0)
    found = [next(begun), next(begun)]
    del begun
    assert two.steps_taken == 2
    found += update(broken, two, batch, old, actor, temperature=1.0, num_done=2)
    assert [report.step for report in found] == [report.step for report in expected]
    assert [report.loss for report in found] == [report.loss for report in expected]
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), broken.model.parameters(), strict=True))


def test_a_stop_is_asked_for_before_each_part_of_a_gradient(
    new_policy: NewPolicy, sampled_batch: Any, actor_of: Any, recording_optimizer: Any
) -> None:
    policy, looks = new_policy(), []

    def check_stop() -> None:
        looks.append((len(recording_optimizer.gradients), any(p.grad is not None for p in parameters)))

    parameters = list(policy.model.parameters())
    batch, actor = sampled_batch(policy), actor_of(mini_batches=2, micro_batch_tokens=1)
    old = old_policy(policy, batch, actor, temperature=1.0)
    list(update(policy, recording_optimizer(policy.model), batch, old, actor, temperature=1.0, check_stop=check_stop))
    assert sorted({*looks}) == [(0, False), (0, True), (1, False), (1, True)] and looks == sorted(looks)


@pytest.fixture
def backward_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at every backward pass."""
    passes: list[int] = []
    backward = torch.Tensor.backward

    def noting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        passes.append(1)
        return backward(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", noting)
    return passes


@pytest.mark.parametrize("rest", [(1,), (0, 2), (0, 1, 2)])  # a third, two thirds (most), all are clipped
@pytest.mark.parametrize("level", LEVELS)
def test_clipped_sequences_cost_no_backward_pass_and_change_no_gradient(
    level: str,
    rest: tuple[int, ...],
    new_policy: NewPolicy,
    ragged_sequences: Any,
    actor_of: Any,
    gradient_of: Any,
    plain_logprobs: Any,
    tokens_read: Any,
    backward_passes: list[int],
) -> None:
    policy = new_policy("qwen3_moe")
    sequences: list[TokenSequence] = ragged_sequences(9, vocabulary=len(policy.tokenizer))
    with torch.no_grad():
        now = [response_likelihood(policy, [sequence]).logprobs for sequence in sequences]
    # Some sequences have gone far enough, whichever way they were to go.
    clipped = [index % 3 in rest for index in range(9)]
    items = [
        Item(
            index=index,
            sequence=sequence,
            advantage=(-1.0) ** index,
            old_logprobs=now[index] - (0.2 * (-1) ** index if clipped[index] else 0.0),
        )
        for index, sequence in enumerate(sequences)
    ]
    expected = torch.zeros((), requires_grad=True)
    for item, none in zip(items, clipped, strict=True):
        if not none:
            expected = expected - item.advantage * plain_logprobs(policy, [item.sequence]).mean() / 9  # Eq. 11 at s = 1
    expected.backward()
    gradient = gradient_of(policy.model)
    tokens = tokens_read(policy)
    for micro_batch_tokens, passes in ((1, clipped.count(False)), (10**6, int(len(rest) < 3))):
        backward_passes.clear()
        tokens.clear()
        actor = actor_of(
            importance_sampling_level=level, clip_low=0.1, clip_high=0.1, micro_batch_tokens=micro_batch_tokens
        )
        trained = accumulate_gradient(policy, items, actor, Denominators(num_sequences=9), 0, temperature=1.0).trained
        assert len(backward_passes) == passes
        assert len(tokens) == (9 if micro_batch_tokens == 1 else 1)
        assert [item.num_clipped == item.num_tokens for item in sorted(trained, key=lambda t: t.index)] == clipped
        assert (gradient_of(policy.model) - gradient).norm() <= 1e-5 * gradient.norm()


def test_one_clipped_token_of_a_response_leaves_the_others_their_gradient(
    new_policy: NewPolicy, actor_of: Any, gradient_of: Any, plain_logprobs: Any
) -> None:
    policy = new_policy()
    sequence = TokenSequence(prompt_ids=(4, 5), response_ids=torch.tensor([6, 7, 8]))
    logprobs = plain_logprobs(policy, [sequence])
    (-logprobs[1:].sum() / 3).backward()
    expected = gradient_of(policy.model)
    old = logprobs.detach() - torch.tensor([0.5, 0, 0])
    item = Item(index=0, sequence=sequence, advantage=1.0, old_logprobs=old)
    actor = actor_of(importance_sampling_level="token", clip_low=0.1, clip_high=0.1)
    trained = accumulate_gradient(policy, [item], actor, Denominators(num_sequences=1), 0, temperature=1.0).trained
    assert [item.num_clipped for item in trained] == [1]
    assert (gradient_of(policy.model) - expected).norm() <= 1e-5 * expected.norm()
