"""The gradient of a mini-batch does not depend on how it is cut (run with -s for the differences)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo.policy.likelihood import Conditioned
from gspo.policy.model import Policy, checkpoint_gradients
from gspo.policy.update import Item, accumulate_gradient

NewPolicy = Callable[..., Policy]
LEVELS = ["sequence", "sequence_token", "token"]
CLIP = {"clip_low": 0.03, "clip_high": 0.04}
CUTS = [(1, 10**6), (60, 10**6), (60, 7), (200, 1), (10**6, 7), (10**6, 10**6)]  # (tokens a micro-batch, a chunk)


@pytest.fixture
def items_of(ragged_sequences: Any, plain_logprobs: Any) -> Callable[[Policy], list[Item]]:
    """Ragged sequences with advantages of both signs, old log-likelihoods off by enough that some are clipped."""

    def build(policy: Policy) -> list[Item]:
        sequences: list[Conditioned] = ragged_sequences(20, vocabulary=len(policy.tokenizer), seed=1)
        with torch.no_grad():
            logprobs = plain_logprobs(policy, sequences)
        generator = torch.Generator().manual_seed(2)
        lengths = [len(s.response_ids) for s in sequences]
        shifts = torch.randn(len(sequences), generator=generator).repeat_interleave(torch.tensor(lengths))
        old = logprobs + 0.06 * (shifts + torch.randn(logprobs.shape, generator=generator))
        advantages = torch.randn(len(sequences), generator=generator).tolist()
        pieces = old.split(lengths)
        return [
            Item(index=index, sequence=sequence, advantage=advantage, old_logprobs=tuple(piece.tolist()))
            for index, (sequence, advantage, piece) in enumerate(zip(sequences, advantages, pieces, strict=True))
        ]

    return build


def plain_loss(logprobs: torch.Tensor, items: list[Item], level: str, num_sequences: int) -> torch.Tensor:
    """-1/G Σ_i of Eq. 6 or Eq. 2-3, sequence by sequence (Eq. 14 has Eq. 6's gradient where Â_{i,t} = Â_i)."""
    total = torch.zeros(())
    start = 0
    for item in items:
        length = len(item.old_logprobs)
        log_ratio = logprobs[start : start + length] - torch.tensor(item.old_logprobs)
        ratio = log_ratio.exp() if level == "token" else log_ratio.mean().exp()
        bounded = torch.clamp(ratio, 1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        total = total + torch.minimum(ratio * item.advantage, bounded * item.advantage).mean()
        start += length
    return -total / num_sequences


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_gradient_is_that_of_the_objective_however_the_mini_batch_is_cut(
    family: str, level: Any, new_policy: NewPolicy, items_of: Any, actor_of: Any, plain_logprobs: Any, gradient_of: Any
) -> None:
    policy = new_policy(family)
    items = items_of(policy)
    num_sequences = 31  # more than there are: some of the mini-batch had no advantage
    logprobs = plain_logprobs(policy, [item.sequence for item in items])
    expected_loss = plain_loss(logprobs, items, level, num_sequences)
    expected_loss.backward()
    expected = gradient_of(policy.model)
    differences = []
    for micro_batch_tokens, chunk_tokens in CUTS:
        actor = actor_of(
            importance_sampling_level=level,
            micro_batch_tokens=micro_batch_tokens,
            logprob_chunk_tokens=chunk_tokens,
            **CLIP,
        )
        trained, loss = accumulate_gradient(policy, items, actor, num_sequences, 0, temperature=1.0)
        gradient = gradient_of(policy.model)
        differences.append(float((gradient - expected).norm() / expected.norm()))
        assert loss == pytest.approx(expected_loss.item(), rel=1e-4, abs=1e-6)
        assert sorted(item.index for item in trained) == list(range(len(items)))
        num_clipped = sum(item.num_clipped > 0 for item in trained)
        assert 3 <= num_clipped <= len(items)
    print(f"{family} {level}: largest relative difference of the gradient {max(differences):.1e}")
    assert max(differences) <= 1e-5


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_reported_of_a_sequence_does_not_depend_on_the_cut(
    level: Any, new_policy: NewPolicy, items_of: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe")
    items = items_of(policy)
    seen = []
    for micro_batch_tokens in (1, 10**6):
        actor = actor_of(importance_sampling_level=level, micro_batch_tokens=micro_batch_tokens, **CLIP)
        trained, _ = accumulate_gradient(policy, items, actor, len(items), 3, temperature=1.0)
        seen.append(sorted(trained, key=lambda item: item.index))
    for alone, together, item in zip(*seen, items, strict=True):
        assert (alone.num_tokens, alone.num_clipped) == (together.num_tokens, together.num_clipped)
        assert alone.num_tokens == len(item.old_logprobs)
        assert alone.sequence_ratio == pytest.approx(together.sequence_ratio, rel=1e-5)
        assert alone.entropy_sum == pytest.approx(together.entropy_sum, rel=1e-4)
        assert alone.mini_batch == together.mini_batch == 3


def test_gradient_checkpointing_changes_no_gradient(
    new_policy: NewPolicy, items_of: Any, actor_of: Any, gradient_of: Any
) -> None:
    policy = new_policy("qwen3_moe")
    items = items_of(policy)
    accumulate_gradient(policy, items, actor_of(**CLIP), len(items), 0, temperature=1.0)
    expected = gradient_of(policy.model)
    checkpoint_gradients(policy)
    policy.model.train()
    accumulate_gradient(policy, items, actor_of(**CLIP), len(items), 0, temperature=1.0)
    assert (gradient_of(policy.model) - expected).norm() / expected.norm() <= 1e-5
