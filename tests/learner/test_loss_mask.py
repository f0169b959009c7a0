"""Tokens that the policy did not write are context: they have no likelihood in the ratio, no loss and no gradient."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.mixtures import MIXTURES
from tests.samples import accumulated, advantaged, learner_of, query_of, sample_of, sequence_of, updates

from gspo.learner.critic import Critic
from gspo.learner.forward_passes import compute_old_logprobs, score_with_models
from gspo.learner.loss import Denominators, denominators_of
from gspo.learner.optimizer import Optimizer
from gspo.model.policy import Policy
from gspo.recipe.sections import CriticConfig, OptimizerConfig
from gspo.types import Group, Sample

NewPolicy = Callable[..., Policy]
CLIP = {"clip_low": 0.03, "clip_high": 0.04}
MASKS = [[1, 1, 0, 0, 0, 1, 1], [1, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0, 1]]  # 1: the policy wrote it


def samples_of(policy: Policy, plain_logprobs: Any) -> list[Sample]:
    """Two of one prompt that is shared, and two others; π_old is off by enough that some are clipped."""
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(range(3, 16))] * 2 + [(4, 5), (7,)]
    samples = []
    for number, (prompt, written) in enumerate(zip(prompts, MASKS, strict=True)):
        mask = torch.tensor(written, dtype=torch.bool)
        ids = torch.randint(3, len(policy.tokenizer), (len(written),), generator=generator)
        sample = sample_of(query_of(prompt, number), ids, loss_mask=mask, advantage=(-1.0) ** number)
        with torch.no_grad():
            logprobs = plain_logprobs(policy, [sequence_of(sample)])[mask]
        noise = 0.05 * torch.randn(len(logprobs), generator=generator)
        samples.append(replace(sample, old_logprobs=logprobs + noise))
    return samples


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2"])
def test_loss_and_gradient_are_those_of_the_equation_without_these_tokens(
    family: str, level: str, new_policy: NewPolicy, actor_of: Any, plain_logprobs: Any, gradient_of: Any
) -> None:
    policy = new_policy(family)
    samples = samples_of(policy, plain_logprobs)
    loss = torch.zeros(())
    for sample in samples:
        own = plain_logprobs(policy, [sequence_of(sample)])[sample.loss_mask]
        log_ratio = own - sample.old_logprobs
        ratio = log_ratio.exp() if level == "token" else log_ratio.mean().exp()  # Eq. 7, its product over these alone
        bounded = ratio.clamp(1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        loss = loss - torch.minimum(ratio * sample.advantage, bounded * sample.advantage).mean() / 4
    loss.backward()
    expected = gradient_of(policy.model)
    for micro_batch_tokens in (1, 30, 10**6):
        actor = actor_of(importance_sampling_level=level, micro_batch_tokens=micro_batch_tokens, **CLIP)
        report, stats = accumulated(policy, samples, actor, Denominators(num_sequences=4))
        assert report.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert (gradient_of(policy.model) - expected).norm() <= 1e-5 * expected.norm()
        assert [own.num_tokens for own in stats] == [sum(mask) for mask in MASKS]
        assert [len(own.log_ratios) for own in stats] == [sum(mask) for mask in MASKS]


def test_every_stage_speaks_of_the_written_tokens_alone(
    new_policy: NewPolicy, actor_of: Any, plain_logprobs: Any
) -> None:
    policy, reference = (new_policy("qwen3_moe", **MIXTURES["qwen3_moe"]) for _ in range(2))
    samples = samples_of(policy, plain_logprobs)
    groups = [Group(samples=tuple(samples[:2])), Group(samples=tuple(samples[2:]))]
    batch = advantaged([*groups, *groups], [1.0, 0.0] * 4)
    uneven = advantaged([Group(samples=(samples[0],)), Group(samples=tuple(samples[1:]))], [1.0, 1.0, 0.0, 1.0]).groups
    divisors: dict[Any, list[float]] = {"mean": [3.0] * 4, "group": [4.0, *[8 / 3] * 3], "constant": [9.0] * 4}
    for norm, expected in divisors.items():
        assert list(denominators_of(uneven, norm, 9).tokens.values()) == expected
    critic = Critic(CriticConfig(trunk="shared"), policy, None, total_steps=1)
    actor = actor_of(mini_batches=2, router_aux_loss=0.1, kl={"coefficient": 0.1}, routing_replay="policy")
    batch = score_with_models(batch, learner_of(policy, actor, critic=critic), reference)
    batch = batch.with_changed({s: replace(s, old_logprobs=None, returns=s.values) for s in batch.samples})
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    optimizer = Optimizer(policy.model, OptimizerConfig(), total_steps=2)
    *_, last = updates(policy, optimizer, batch, actor, critic=critic)
    for index, sample in enumerate(last.batch.samples):
        written = sum(MASKS[index % 4])
        assert sample.reference_logprobs is not None and sample.values is not None and sample.stats is not None
        assert len(sample.reference_logprobs) == len(sample.values) == sample.stats.num_tokens == written
        assert index < 4 or (sample.old_logprobs is not None and len(sample.old_logprobs) == written)
        # The experts are those of all tokens that are read, so that they can be used again.
        assert index < 4 or (sample.old_experts is not None and len(sample.old_experts.row) == sample.num_tokens)
