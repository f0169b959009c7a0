"""Signal and noise of a gradient: unbiased, of halves that make up the whole, and without changing it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.samples import Step, advantages_of, changed, learner_of, query_of, sample_of, updates

from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.micro_batching import micro_batches, slowest_over_mean, split_point, trained_samples
from gspo.learner.optimizer import Optimizer, StepReport, gradient_noise
from gspo.model.policy import Policy
from gspo.recipe.sections import ActorConfig
from gspo.types import Batch, Sample

NewPolicy = Callable[..., Policy]
REWARDS = [[1.0, 0.0, 0.2], [0.0, 1.0], [2.0, 0.0, 1.0, 0.5], [1.0, 0.0]]  # of 11 sequences 5 come before the middle


class Noting(Optimizer):
    """Notes what the first half and the whole of each mini-batch's gradient were; changes no weight."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.halves: list[torch.Tensor] = []
        self.wholes: list[torch.Tensor] = []

    def gradient(self) -> list[torch.Tensor]:
        found = super().gradient()
        if len(self.halves) == len(self.wholes):  # the second call of a mini-batch is for the whole
            self.halves.append(torch.cat([one.flatten() for one in found]))
        return found

    def step(self, *, loss_is_finite: bool = True) -> StepReport:
        self.wholes.append(torch.cat([one.flatten() for one in Optimizer.gradient(self)]))
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return StepReport(grad_norm=0.0, learning_rate=0.0, applied=True)


def noted(policy: Policy, batch: Batch, actor: ActorConfig) -> tuple[Noting, list[Step]]:
    optimizer = Noting(policy.model, actor.optimizer, total_steps=1)
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    return optimizer, list(updates(policy, optimizer, batch, actor))


@pytest.mark.parametrize("first", [2, 5, 8])
def test_signal_and_noise_are_in_the_mean_those_of_the_gradients_they_are_drawn_from(first: int) -> None:
    generator = torch.Generator().manual_seed(first)
    n, draws, truth = 10, 3_000, torch.tensor([1.0, -0.6, 0.3, 0.0])
    spread = torch.tensor([1.0, 0.5, 0.0, 2.0])
    samples = truth + spread * torch.randn(draws, n, 4, generator=generator)
    halves, wholes = samples[:, :first].sum(1) / n, samples.mean(1)  # as a mini-batch adds them up
    signal = noise = 0.0
    for half, whole in zip(halves, wholes, strict=True):
        found = gradient_noise([half[:2], half[2:]], [whole[:2], whole[2:]], first / n)
        signal, noise = signal + found.signal / draws, noise + found.noise / draws
    assert signal == pytest.approx(float(truth @ truth), abs=0.15)
    assert noise == pytest.approx(float(spread @ spread) / n, rel=0.06)


def test_of_two_halves_signal_is_their_product_and_noise_their_distance() -> None:
    one, other = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[3.0, -1.0]], dtype=torch.float64)
    found = gradient_noise([one / 4], [(one + 3 * other) / 4], 1 / 4)
    assert found.signal == pytest.approx(1.0) and found.noise == pytest.approx(3 / 16 * (2**2 + 3**2))
    same = gradient_noise([one / 4], [one], 1 / 4)
    assert same.signal == pytest.approx(5.0) and same.noise == pytest.approx(0.0)


def test_a_mini_batch_is_halved_between_groups_as_near_to_its_middle_as_can_be() -> None:
    def of_groups(*sizes: int) -> list[Sample]:
        return [sample_of(query_of([number]), [1]) for number, size in enumerate(sizes) for _ in range(size)]

    sizes = [((4, 4), 4), ((3, 2, 4, 2), 5), ((1, 9), 1), ((9, 1), 9), ((7,), 0), ((), 0), ((2, 2, 2), 2)]
    assert [split_point(of_groups(*size)) for size, _ in sizes] == [half for _, half in sizes]


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10**6])
def test_the_first_half_is_the_gradient_of_its_own_groups_and_the_whole_is_not_changed(
    micro_batch_tokens: int, new_policy: NewPolicy, batch_of: Any, actor_of: Any
) -> None:
    policy = new_policy()
    batch = batch_of(REWARDS, vocabulary=len(policy.tokenizer))
    actor = actor_of(micro_batch_tokens=micro_batch_tokens, gradient_noise=True)
    parts = [*micro_batches(learner_of(policy, actor), trained_samples(batch.groups, actor))]
    assert [place for part, _ in parts for place in part] == [*range(11)]
    assert [place for part, is_second in parts for place in part if is_second] == [*range(5, 11)]
    optimizer, ((report, trained, _),) = noted(policy, batch, actor)
    plain, ((silent, trained_silently, _),) = noted(policy, batch, actor_of(gradient_noise=False))
    torch.testing.assert_close(optimizer.wholes[0], plain.wholes[0], rtol=1e-4, atol=1e-6)
    assert silent.noise is None and plain.halves == []
    assert list(trained) == list(trained_silently)
    # The other groups' advantages gone, what is left is the half's, over the same number of sequences.
    advantages = advantages_of(batch)
    alone = changed(batch, advantage=[*advantages[:5], *[0.0] * 6])
    half, _ = noted(policy, alone, actor_of(gradient_noise=False))
    torch.testing.assert_close(optimizer.halves[0], half.wholes[0], rtol=1e-4, atol=1e-6)
    rest = changed(batch, advantage=[*[0.0] * 5, *advantages[5:]])
    other, _ = noted(policy, rest, actor_of(gradient_noise=False))
    torch.testing.assert_close(half.wholes[0] + other.wholes[0], plain.wholes[0], rtol=1e-4, atol=1e-6)
    expected = gradient_noise([half.wholes[0]], [plain.wholes[0]], 5 / 11)
    assert report.noise is not None
    assert (report.noise.signal, report.noise.noise) == pytest.approx((expected.signal, expected.noise), rel=1e-3)


def test_ranks_share_each_half_for_none_begins_the_second_before_all_have_ended_the_first(
    new_policy: NewPolicy, actor_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dealt as a whole, the two long groups would be each a half and a rank's own: the ranks would work in turn."""
    policy = new_policy()
    samples = [sample_of(query_of([number]), [1] * size) for number, size in enumerate((60, 60, 3, 3)) for _ in (1, 2)]
    samples = [replace(sample, advantage=1.0) for sample in [*samples[:2], *samples[4:], *samples[2:4]]]
    learner, module = learner_of(policy, actor_of(gradient_noise=True)), "gspo.learner.micro_batching"
    monkeypatch.setattr(f"{module}.num_ranks", lambda: 2)
    for own in (0, 1):
        monkeypatch.setattr(f"{module}.rank", lambda own=own: own)
        halves = [[len(samples[place].token_ids) for place in part] for part, _ in micro_batches(learner, samples)]
        assert [sum(half) for half in halves] == [63, 63]
    assert slowest_over_mean(learner, samples) == pytest.approx(1.0)


def test_of_a_single_group_nothing_is_measured(new_policy: NewPolicy, batch_of: Any, actor_of: Any) -> None:
    policy = new_policy()
    batch = batch_of([[1.0, 1.0], [1.0, 0.0, 0.5]], vocabulary=len(policy.tokenizer))  # only the second one trains
    optimizer, (step,) = noted(policy, batch, actor_of(gradient_noise=True))
    assert step.report.noise is None and optimizer.halves == [] and optimizer.wholes[0].any()
