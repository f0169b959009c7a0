"""What an update computes and what it leaves out: forward passes for π_old, backward passes of what is clipped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.samples import accumulated, advantaged, changed, learner_of, sample_from, sequence_of, updates
from tests.sampling import sample_groups
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.loss import Denominators, denominators_of
from gspo.learner.micro_batching import Learner, micro_batches, trained_samples
from gspo.learner.update import accumulate_gradient, update
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.recipe.sections import ActorConfig, RolloutConfig
from gspo.types import Batch

NewPolicy = Callable[..., Policy]
LEVELS = ["sequence", "sequence_token", "token"]


@pytest.fixture
def sampled_batch(query_of: Any) -> Callable[[Policy], Batch]:
    """Four queries with prompts of unequal length, four responses each, two of which the mean hits in the second."""

    def build(policy: Policy) -> Batch:
        queries = [query_of([4 + n] * (1 + 6 * n), n) for n in range(4)]
        groups = sample_groups(policy, queries, RolloutConfig(max_new_tokens=9), group_size=4, seed=0, policy_version=0)
        rewards = [0.0, 1.0, 2.0, 4.0, 0.0, 0.5, 0.5, 1.0, *[0.0, 0.0, 1.0, 3.0] * 2]
        return advantaged(groups, rewards)

    return build


def tokens_of(batch: Batch, members: range, actor: ActorConfig) -> list[tuple[int, int]]:
    """The shapes that the trainable sequences have one by one, in their order."""
    samples = [batch.samples[index] for index in members]
    return [(1, sequence_of(s).num_tokens - 1) for s in samples if s in trained_samples(batch.groups, actor)]


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


def test_what_ranks_have_computed_is_measured_without_their_waits(
    new_policy: NewPolicy, sampled_batch: Any, actor_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has computed for 1 s, and this one for 3 s of its thread's own time."""
    policy, own_time = new_policy(), iter([20.0, 23.0])
    batch, actor = sampled_batch(policy), actor_of()
    monkeypatch.setattr("time.thread_time", lambda: next(own_time))
    monkeypatch.setattr("gspo.learner.update.gathered", lambda seen: [seen, ([], [], [], 1.0)])
    samples, denominators = trained_samples(batch.groups, actor), Denominators(num_sequences=16)
    report, _ = accumulate_gradient(learner_of(policy, actor), samples, denominators, 0)
    assert report.measured_slowest_over_mean == 3.0 / 2.0


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
        batch = compute_old_logprobs(batch, learner_of(policy, actor))
        samples = trained_samples(batch.groups, actor)
        denominators = denominators_of(batch.groups, actor.length_norm, max_tokens=9)
        with Waits() as waits:
            accumulated(policy, samples, actor, denominators)
        counts.append(len(waits.names))
        assert len(waits.names) == len([*micro_batches(learner_of(policy, actor), samples)])
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
    assert batch.samples[5].advantage == batch.samples[6].advantage == 0
    actor = actor_of(old_logprobs="recompute", mini_batches=mini_batches, micro_batch_tokens=1)
    shapes = tokens_read(policy)
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    later = tokens_of(batch, range(16 // mini_batches, 16), actor)
    assert shapes == later and sum(sample.old_logprobs is not None for sample in batch.samples) == len(later)
    shapes.clear()
    list(updates(policy, recording_optimizer(policy.model), batch, actor))
    assert shapes == tokens_of(batch, range(16), actor)


def test_the_engines_log_likelihoods_cost_no_pass(
    new_policy: NewPolicy, sampled_batch: Any, actor_of: Any, tokens_read: Any
) -> None:
    policy = new_policy()
    batch = sampled_batch(policy)
    shapes = tokens_read(policy)
    actor = actor_of(old_logprobs="engine", mini_batches=2)
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    assert shapes == []
    assert all(s.old_logprobs is s.sampler_logprobs for s in trained_samples(batch.groups, actor))
    shaped = changed(batch, full_logprobs=[s.sampler_logprobs - 0.1 for s in batch.samples])  # drawn from another q
    shaped = compute_old_logprobs(shaped, learner_of(policy, actor))
    assert all(s.old_logprobs is s.full_logprobs for s in trained_samples(shaped.groups, actor))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_ratios_of_recomputed_log_likelihoods_are_exactly_one_until_a_step_is_made(
    level: str, dtype: str, new_policy: NewPolicy, sampled_batch: Any, actor_of: Any, recording_optimizer: Any
) -> None:
    policy = new_policy(dtype=dtype)
    batch, optimizer = sampled_batch(policy), recording_optimizer(policy.model)
    for micro_batch_tokens in (1, 30, 10**6):
        actor = actor_of(mini_batches=2, micro_batch_tokens=micro_batch_tokens, importance_sampling_level=level)
        known = compute_old_logprobs(batch, learner_of(policy, actor, temperature=0.7))
        for step in updates(policy, optimizer, known, actor, temperature=0.7):
            assert {stats.sequence_ratio for stats in step.trained.values()} == {1.0}
            assert sum(stats.num_clipped for stats in step.trained.values()) == 0


def test_a_stop_is_asked_for_before_each_part_of_a_gradient(
    new_policy: NewPolicy, sampled_batch: Any, actor_of: Any, recording_optimizer: Any
) -> None:
    policy, looks = new_policy(), []

    def check_stop() -> None:
        looks.append((len(recording_optimizer.gradients), any(p.grad is not None for p in parameters)))

    parameters = list(policy.model.parameters())
    batch, actor = sampled_batch(policy), actor_of(mini_batches=2, micro_batch_tokens=1)
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    learner = Learner(
        policy=policy,
        optimizer=recording_optimizer(policy.model),
        actor=actor,
        temperature=1.0,
        check_stop=check_stop,
    )
    list(update(learner, batch))
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
        sample_from(
            sequence,
            advantage=(-1.0) ** index,
            old_logprobs=now[index] - (0.2 * (-1) ** index if clipped[index] else 0.0),
        )
        for index, sequence in enumerate(sequences)
    ]
    expected = torch.zeros((), requires_grad=True)
    for item, none in zip(items, clipped, strict=True):
        if not none:
            expected = (
                expected - item.advantage * plain_logprobs(policy, [sequence_of(item)]).mean() / 9
            )  # Eq. 11 at s = 1
    expected.backward()
    gradient = gradient_of(policy.model)
    tokens = tokens_read(policy)
    for micro_batch_tokens, passes in ((1, clipped.count(False)), (10**6, int(len(rest) < 3))):
        backward_passes.clear()
        tokens.clear()
        actor = actor_of(
            importance_sampling_level=level, clip_low=0.1, clip_high=0.1, micro_batch_tokens=micro_batch_tokens
        )
        _, trained = accumulated(policy, items, actor, Denominators(num_sequences=9))
        assert len(backward_passes) == passes
        assert len(tokens) == (9 if micro_batch_tokens == 1 else 1)
        assert [own.num_clipped == own.num_tokens for own in trained] == clipped
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
    item = sample_from(sequence, advantage=1.0, old_logprobs=old)
    actor = actor_of(importance_sampling_level="token", clip_low=0.1, clip_high=0.1)
    _, trained = accumulated(policy, [item], actor, Denominators(num_sequences=1))
    assert [own.num_clipped for own in trained] == [1]
    assert (gradient_of(policy.model) - expected).norm() <= 1e-5 * expected.norm()
