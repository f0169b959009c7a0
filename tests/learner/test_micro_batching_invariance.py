"""The gradient of a mini-batch does not depend on how it is cut, packed or kept (run with -s for the differences)."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.samples import accumulated, sample_from, sequence_of

from gspo.learner.loss import Denominators
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, checkpoint_gradients
from gspo.types import Sample, SequenceStats

NewPolicy = Callable[..., Policy]
LEVELS = ["sequence", "sequence_token", "token"]
CLIP = {"clip_low": 0.03, "clip_high": 0.04}
CUTS = [(1, 10**6), (60, 10**6), (60, 7), (200, 1), (10**6, 7), (10**6, 10**6)]  # (tokens a micro-batch, a chunk)
FEW_CUTS = [(60, 7), (10**6, 10**6)]
SMALL = {"num_hidden_layers": 3, "hidden_size": 16}  # an odd number: mixed layer types are not symmetric
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 mixed": {**SMALL, **MIXED, "use_sliding_window": True},
    "qwen3_moe": {},
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "gemma2": {},
    "gemma3_text": {**SMALL, **MIXED},
    "gpt2": {},
    "granite": {},
    "cohere": {},
}
# Activations kept or recomputed, old log-likelihoods given or the pass's own: every model has both of each. All four
# pairs are there where packs slide, where there are experts and where there are no packs.
KINDS = [
    (model, checkpointing, old_given)
    for model in MODELS
    for checkpointing in (False, True)
    for old_given in (True, False)
    if checkpointing != old_given or model in ("qwen3 mixed", "qwen3_moe", "gemma2")
]
NUM_SEQUENCES = 31  # more than there are: some of the mini-batch had no advantage


def grouped_sequences(vocabulary: int) -> list[TokenSequence]:
    """Groups of one prompt (of 13, 1 and 6 tokens), a sequence alone; ragged responses, some of one token."""
    rng = random.Random(4)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocabulary) for _ in range(count))

    found = []
    for prompt, lengths in ((13, (1, 9, 4, 12, 1)), (1, (5, 1, 7)), (5, (3,)), (6, (11, 2, 1, 8))):
        prompt_ids = tokens(prompt)
        found += [TokenSequence(prompt_ids=prompt_ids, response_ids=torch.tensor(tokens(n))) for n in lengths]
    return found


@pytest.fixture
def items_of(plain_logprobs: Any) -> Callable[..., list[Sample]]:
    """Sequences with advantages of both signs, old log-likelihoods off by enough that some are clipped."""

    def build(policy: Policy, sequences: Sequence[TokenSequence], temperature: float = 1.0) -> list[Sample]:
        with torch.no_grad():
            logprobs = plain_logprobs(policy, sequences, temperature)
        generator = torch.Generator().manual_seed(2)
        lengths = [len(s.response_ids) for s in sequences]
        shifts = torch.randn(len(sequences), generator=generator).repeat_interleave(torch.tensor(lengths))
        old = logprobs + 0.06 * (shifts + torch.randn(logprobs.shape, generator=generator))
        advantages = torch.randn(len(sequences), generator=generator).tolist()
        return [
            sample_from(sequence, advantage=advantage, old_logprobs=piece)
            for sequence, advantage, piece in zip(sequences, advantages, old.split(lengths), strict=True)
        ]

    return build


def plain_loss(logprobs: torch.Tensor, items: list[Sample], level: str) -> torch.Tensor:
    """-1/G Σ_i of Eq. 6 or Eq. 2-3, sequence by sequence (Eq. 14 has Eq. 6's gradient where Â_{i,t} = Â_i)."""
    total = torch.zeros(())
    start = 0
    for item in items:
        own = logprobs[start : start + item.num_tokens]
        log_ratio = own - (own.detach() if item.old_logprobs is None else item.old_logprobs)
        ratio = log_ratio.exp() if level == "token" else log_ratio.mean().exp()
        bounded = torch.clamp(ratio, 1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        total = total + torch.minimum(ratio * item.advantage, bounded * item.advantage).mean()
        start += len(own)
    return -total / NUM_SEQUENCES


@pytest.fixture
def check_cuts(
    actor_of: Any, plain_logprobs: Any, gradient_of: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[SequenceStats]]]:
    """Loss and gradient against one sequence at a time, at every cut; returns what was reported of the sequences."""

    def check(
        policy: Policy,
        items: list[Sample],
        level: str,
        temperature: float = 1.0,
        cuts: Sequence[tuple[int, int]] = CUTS,
        plain: Policy | None = None,
    ) -> list[list[SequenceStats]]:
        plain = plain or policy
        expected_loss = plain_loss(plain_logprobs(plain, list(map(sequence_of, items)), temperature), items, level)
        expected_loss.backward()
        expected = gradient_of(plain.model)
        differences, reports = [], []
        for micro_batch_tokens, chunk_tokens in cuts:
            monkeypatch.setattr("gspo.model.head.MAX_LOGITS", chunk_tokens * len(policy.tokenizer))
            actor = actor_of(importance_sampling_level=level, micro_batch_tokens=micro_batch_tokens, **CLIP)
            seen, stats = accumulated(
                policy, items, actor, Denominators(num_sequences=NUM_SEQUENCES), 3, temperature=temperature
            )
            differences.append(float((gradient_of(policy.model) - expected).norm() / expected.norm()))
            assert seen.loss == pytest.approx(expected_loss.item(), rel=1e-4, abs=1e-6)
            reports.append(stats)
        kind = type(policy.model).__name__
        print(f"{kind} {level}: largest relative difference of the gradient {max(differences):.1e}")
        assert max(differences) <= 1e-5
        return reports

    return check


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_gradient_is_that_of_the_objective_however_the_mini_batch_is_cut(
    family: str, level: Any, new_policy: NewPolicy, items_of: Any, ragged_sequences: Any, check_cuts: Any
) -> None:
    policy = new_policy(family)
    items = items_of(policy, ragged_sequences(20, vocabulary=len(policy.tokenizer), seed=1))
    for trained in check_cuts(policy, items, level, cuts=CUTS if family == "qwen3" else FEW_CUTS):
        num_clipped = sum(item.num_clipped > 0 for item in trained)
        assert 3 <= num_clipped <= len(items)


@pytest.mark.parametrize(("model", "checkpointing", "old_given"), KINDS)
def test_groups_that_share_prompts_have_the_gradient_of_their_sequences_one_by_one(
    model: str, checkpointing: bool, old_given: bool, new_policy: NewPolicy, items_of: Any, check_cuts: Any
) -> None:
    family, plain = model.split()[0], new_policy(model.split()[0], **MODELS[model])
    policy = new_policy(family, **MODELS[model]) if checkpointing else plain
    assert policy.supports_packing == (family != "gemma2")
    sequences = grouped_sequences(len(policy.tokenizer))
    if checkpointing:
        checkpoint_gradients(policy)
    # Levels and temperatures take turns; some of the cuts split groups.
    turn = list(MODELS).index(model) + checkpointing + 2 * old_given
    level, temperature = LEVELS[turn % 3], (1.0, 0.7, 1.3)[(turn // 2) % 3]
    cuts = [(25, 7), (30 + turn, 10**6), (10**6, 7 if old_given else 1)]
    items = items_of(plain, sequences, temperature)
    if not old_given:
        items = [dataclasses.replace(item, old_logprobs=None) for item in items]
    for trained in check_cuts(policy, items, level, temperature, cuts, plain):
        if old_given:
            assert 3 <= sum(item.num_clipped > 0 for item in trained) <= len(items)
        else:
            assert all(item.sequence_ratio == 1 and item.num_clipped == 0 for item in trained)


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize(("model", "level"), zip(["qwen3 mixed", "qwen3_moe", "mistral"], LEVELS, strict=True))
def test_sharing_a_prompt_changes_no_gradient_whether_it_pays_or_not(
    model: str,
    level: str,
    shares: bool,
    new_policy: NewPolicy,
    items_of: Any,
    check_cuts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decided(sequences: Any, members: Sequence[int], hidden_size: int | None) -> bool:
        return shares and hidden_size is not None and len(sequences[members[0]].prompt_ids) > 1

    monkeypatch.setattr("gspo.model.packing._shares", decided)  # even for a sequence alone
    policy = new_policy(model.split()[0], **MODELS[model])
    items = items_of(policy, grouped_sequences(len(policy.tokenizer)), 0.8)
    assert policy.supports_packing
    check_cuts(policy, items, level, 0.8, [(25, 7), (60, 10**6), (10**6, 1)])


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_reported_of_a_sequence_does_not_depend_on_the_cut(
    level: Any, new_policy: NewPolicy, items_of: Any, check_cuts: Any, ragged_sequences: Any
) -> None:
    policy = new_policy("qwen3_moe")
    vocabulary = len(policy.tokenizer)
    items = items_of(policy, [*ragged_sequences(20, vocabulary=vocabulary, seed=1), *grouped_sequences(vocabulary)])
    seen = check_cuts(policy, items, level, cuts=[(1, 10**6), (10**6, 10**6)])
    for alone, together, item in zip(*seen, items, strict=True):
        assert (alone.num_tokens, alone.num_clipped) == (together.num_tokens, together.num_clipped)
        assert alone.num_tokens == len(item.old_logprobs)
        assert torch.equal(alone.old_logprobs, item.old_logprobs) and torch.equal(
            together.old_logprobs, alone.old_logprobs
        )
        assert alone.sequence_ratio == pytest.approx(together.sequence_ratio, rel=1e-5)
        assert alone.entropy_sum == pytest.approx(together.entropy_sum, rel=1e-4)
        assert alone.mini_batch == together.mini_batch == 3


def test_gradient_checkpointing_changes_no_gradient(
    new_policy: NewPolicy, items_of: Any, actor_of: Any, gradient_of: Any, ragged_sequences: Any
) -> None:
    policy = new_policy("qwen3_moe")
    items = items_of(policy, ragged_sequences(20, vocabulary=len(policy.tokenizer), seed=1))
    accumulated(policy, items, actor_of(**CLIP), Denominators(num_sequences=len(items)))
    expected = gradient_of(policy.model)
    checkpoint_gradients(policy)
    policy.model.train()
    accumulated(policy, items, actor_of(**CLIP), Denominators(num_sequences=len(items)))
    assert (gradient_of(policy.model) - expected).norm() / expected.norm() <= 1e-5
