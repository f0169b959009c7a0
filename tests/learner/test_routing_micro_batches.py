"""Under replay, what a mini-batch gives does not depend on how it is cut, packed, padded, shared or kept."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.mixtures import MIXTURES, random_experts, replayed_logprobs, router_calls, routers_of
from tests.samples import accumulated, sample_from

from gspo.learner.loss import Denominators
from gspo.model.packing import TokenSequence, pack
from gspo.model.policy import Policy, checkpoint_gradients, response_likelihood
from gspo.types import Sample

NewPolicy = Callable[..., Policy]
RUNS = [
    *(("qwen3_moe", packs, kept) for packs in (True, False) for kept in (True, False)),
    *(("gpt_oss", False, kept) for kept in (True, False)),
    *(("deepseek_v3", packs, not packs) for packs in (True, False)),
    ("mixtral", True, True),
]


def mixture(new_policy: NewPolicy, family: str, packs: bool = True, kept: bool = True) -> Policy:
    policy = new_policy(family, **MIXTURES[family])
    assert policy.supports_packing == (family != "gpt_oss")
    if not kept:
        checkpoint_gradients(policy)
    return replace(policy, supports_packing=packs)


def grouped_sequences(policy: Policy) -> list[TokenSequence]:
    """Groups of one prompt (of 13, 1 and 6 tokens), a sequence alone; ragged responses, some of one token."""
    rng = random.Random(4)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, len(policy.tokenizer)) for _ in range(count))

    found = []
    for prompt, lengths in ((13, (1, 9, 4, 1)), (1, (5, 1)), (5, (3,)), (6, (11, 2, 1))):
        prompt_ids = tokens(prompt)
        found += [TokenSequence(prompt_ids=prompt_ids, response_ids=torch.tensor(tokens(n))) for n in lengths]
    return random_experts(policy, found)


def items_of(sequences: list[TokenSequence], old: torch.Tensor) -> list[Sample]:
    """With advantages of both signs; old log-likelihoods off by enough that some are clipped."""
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(len(sequences), generator=generator).tolist()
    pieces = old.split([len(sequence.response_ids) for sequence in sequences])
    return [
        sample_from(sequence, advantage=advantages[index], old_logprobs=piece + 0.1 * (index % 3 - 1))
        for index, (sequence, piece) in enumerate(zip(sequences, pieces, strict=True))
    ]


@pytest.mark.parametrize(("family", "packs", "kept"), RUNS)
def test_log_likelihoods_and_gradient_are_those_of_the_sequences_one_by_one(
    family: str,
    packs: bool,
    kept: bool,
    new_policy: NewPolicy,
    actor_of: Any,
    plain_logprobs: Any,
    gradient_of: Any,
) -> None:
    policy, plain = mixture(new_policy, family, packs, kept), mixture(new_policy, family)
    sequences = grouped_sequences(policy)
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    assert (layout.blocks[0].prefix == 12) == packs  # a prompt is shared
    assert any(block.place is not None for block in layout.blocks)  # and rows are padded
    expected = replayed_logprobs(plain, sequences, plain_logprobs, 0.8)
    found = response_likelihood(policy, sequences, temperature=0.8).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    items = items_of(sequences, expected.detach())
    loss, start = torch.zeros(()), 0
    for item in items:
        own = expected[start : start + item.num_tokens]
        start += len(own)
        assert item.old_logprobs is not None
        ratio = (own - item.old_logprobs).mean().exp()  # Eq. 7 of the paper, then Eq. 5
        loss = loss - torch.minimum(ratio * item.advantage, ratio.clamp(0.95, 1.05) * item.advantage) / 12
    loss.backward()
    gradient = gradient_of(plain.model)
    for micro_batch_tokens in (1, 30, 10**6) if kept else (30, 10**6):
        settings = {"clip_low": 0.05, "clip_high": 0.05, "routing_replay": "engine"}
        actor = actor_of(**settings, micro_batch_tokens=micro_batch_tokens)
        seen, stats = accumulated(policy, items, actor, Denominators(num_sequences=12), temperature=0.8)
        assert seen.loss == pytest.approx(loss.item(), rel=1e-4)
        assert 1 <= sum(own.num_clipped > 0 for own in stats) < len(items)
        assert (gradient_of(policy.model) - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_activations_that_are_computed_again_are_those_of_the_replayed_experts(
    family: str, new_policy: NewPolicy
) -> None:
    policy = mixture(new_policy, family, family != "gpt_oss", kept=False)
    sequences = grouped_sequences(policy)
    with router_calls(policy) as calls:
        logprobs = response_likelihood(policy, sequences).logprobs
        forward = len(calls)
        logprobs.sum().backward()
    used, again = (
        sorted((layer, output[2].tolist()) for layer, _, output in part) for part in (calls[:forward], calls[forward:])
    )
    assert len(used) >= 3 and again == used
    with router_calls(policy) as live:
        response_likelihood(policy, [replace(one, experts=None) for one in sequences])
    assert all((layer, output[2].tolist()) not in used for layer, _, output in live)


@pytest.mark.parametrize("broken_off", ["in the pass", "computing again"])
def test_a_backward_pass_that_fails_leaves_no_replay_behind(broken_off: str, new_policy: NewPolicy) -> None:
    policy = mixture(new_policy, "qwen3_moe", kept=False)
    told = grouped_sequences(policy)
    ids = torch.arange(2, 12)[None]
    expected = policy.model(input_ids=ids).logits
    logprobs = response_likelihood(policy, told).logprobs

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    hook = routers_of(policy)[1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logprobs.sum().backward() if broken_off == "computing again" else response_likelihood(policy, told)
    hook.remove()
    assert torch.equal(policy.model(input_ids=ids).logits, expected)


def test_a_backward_pass_long_after_replays_its_own_experts(new_policy: NewPolicy, gradient_of: Any) -> None:
    """Recomputation is told the experts of its own pass, whatever has been replayed since."""
    kept, policy = mixture(new_policy, "qwen3_moe"), mixture(new_policy, "qwen3_moe", kept=False)
    sequences = grouped_sequences(kept)
    response_likelihood(kept, sequences).logprobs.sum().backward()
    expected = gradient_of(kept.model)
    first = response_likelihood(policy, sequences).logprobs
    others = random_experts(policy, sequences, seed=9)
    response_likelihood(policy, others)
    assert policy.routing is not None
    with policy.routing.traced():  # nor does what is traced while it runs
        first.sum().backward()
    assert (gradient_of(policy.model) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "apart"])
def test_sharing_a_prompt_changes_no_replay(
    shares: bool, new_policy: NewPolicy, plain_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decided(sequences: Any, members: Any, hidden_size: int | None) -> bool:
        return shares and hidden_size is not None and len(sequences[members[0]].prompt_ids) > 1

    monkeypatch.setattr("gspo.model.packing._shares", decided)  # even for a sequence alone
    policy = mixture(new_policy, "qwen3_moe")
    sequences = grouped_sequences(policy)
    with torch.no_grad():
        expected = replayed_logprobs(policy, sequences, plain_logprobs)
        found = response_likelihood(policy, sequences).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
