"""A trajectory stored in pieces, each with a context of its own, has one ratio and one weight."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.samples import accumulated, query_of, sample_of

from gspo.learner.loss import Denominators
from gspo.learner.micro_batching import token_sequence, trained_samples
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.types import Experts, Group, Sample, Score

NewPolicy = Callable[..., Policy]
CLIP = {"clip_low": 0.03, "clip_high": 0.04}
PROMPT = (5, 9, 4, 8, 7, 6, 11, 3)
# Tokens of a context and of what was written behind it, again and again; the first context of a trajectory may be the
# query's prompt, and a later one begin with it.
SHARED, OWN = (*PROMPT, 12, 13), (6, 11, 16)
PIECES: list[list[list[tuple[int, ...]]]] = [
    [[PROMPT, (17, 5, 10), (5, 10), (15, 3)], [SHARED, (8, 13, 18, 6)]],
    [[OWN, (17, 5)], [(*OWN, 15), (11,), (3,), (16, 4)], [(4, 9, 14, 19), (9, 14)]],
    [[PROMPT, (19, 7, 12)]],
    [[SHARED, (17, 5, 10)], [SHARED, (15, 3)]],
]


def trajectory(pieces: list[list[tuple[int, ...]]], advantage: float) -> Sample:
    """The pieces as one sample."""
    ids, mask, starts = list[int](), list[bool](), list[int]()
    for piece in pieces:
        context, *rest = piece
        if context != PROMPT:
            starts.append(len(ids))
            ids, mask = [*ids, *context], [*mask, *[False] * len(context)]
        for number, part in enumerate(rest):
            ids, mask = [*ids, *part], [*mask, *[number % 2 == 0] * len(part)]
    fields: dict[str, Any] = {"loss_mask": torch.tensor(mask), "starts": tuple(starts), "advantage": advantage}
    return sample_of(query_of(PROMPT), ids, **fields)


def written_logprobs(policy: Policy, pieces: list[list[tuple[int, ...]]], plain_logprobs: Any) -> torch.Tensor:
    """Those of all written tokens, from a plain pass over each piece."""
    found = []
    for first, *rest in pieces:
        mask = torch.tensor([number % 2 == 0 for number, part in enumerate(rest) for _ in part])
        row = TokenSequence(prompt_ids=first, response_ids=torch.tensor([token for part in rest for token in part]))
        found.append(plain_logprobs(policy, [row])[mask])
    return torch.cat(found)


@pytest.mark.parametrize("level", ["sequence", "sequence_token", "token"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2"])
def test_loss_and_gradient_are_those_of_one_ratio_over_all_pieces(
    family: str, level: str, new_policy: NewPolicy, actor_of: Any, plain_logprobs: Any, gradient_of: Any
) -> None:
    policy, generator = new_policy(family), torch.Generator().manual_seed(4)
    samples, loss = list[Sample](), torch.zeros(())
    for number, pieces in enumerate(PIECES):
        own = written_logprobs(policy, pieces, plain_logprobs)
        shift = 0.05 * torch.randn(1, generator=generator)
        old = own.detach() + shift + 0.02 * torch.randn(len(own), generator=generator)
        sample = replace(trajectory(pieces, (-1.0) ** number), old_logprobs=old)
        assert token_sequence(sample, actor_of()).scored_ids.tolist() == [
            token for piece in pieces for part in piece[1::2] for token in part
        ]
        log_ratio = own - old
        ratio = log_ratio.exp() if level == "token" else log_ratio.mean().exp().expand(len(own))
        bounded = ratio.clamp(1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        term = torch.minimum(ratio * sample.advantage, bounded * sample.advantage)
        loss = loss - term.mean() / len(PIECES)  # weight 1 / G, however many pieces
        samples.append(sample)
    loss.backward()
    expected = gradient_of(policy.model)
    for micro_batch_tokens in (1, 30, 10**6):
        actor = actor_of(importance_sampling_level=level, micro_batch_tokens=micro_batch_tokens, **CLIP)
        report, stats = accumulated(policy, samples, actor, Denominators(num_sequences=len(PIECES)))
        assert report.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        gradient = gradient_of(policy.model)
        # GSPO-token has GSPO's gradient where all tokens have one advantage.
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()
        assert len({round(own.sequence_ratio, 6) for own in stats}) == len(PIECES)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_one_row_and_several_have_the_same_gradient(
    family: str, new_policy: NewPolicy, actor_of: Any, gradient_of: Any
) -> None:
    """The second turn stands behind the first, or is a piece of its own, whose context has the first one's tokens."""
    policy = new_policy(family)
    one: list[list[tuple[int, ...]]] = [[PROMPT, (17, 5, 10), (5, 10), (15, 3), (15,), (8, 13)]]
    first, second, third = (*PROMPT,), (*PROMPT, 17, 5, 10, 5, 10), (*PROMPT, 17, 5, 10, 5, 10, 15, 3, 15)
    many: list[list[tuple[int, ...]]] = [[first, (17, 5, 10)], [second, (15, 3)], [third, (8, 13)]]
    old, gradients = -torch.rand(7, generator=torch.Generator().manual_seed(1)) * 0.1 - 3.3, []
    for pieces in (one, many):
        sample = replace(trajectory(pieces, 0.7), old_logprobs=old)
        accumulated(policy, [sample], actor_of(clip_low=1.0, clip_high=9.0), Denominators(num_sequences=1))
        gradients.append(gradient_of(policy.model))
    assert gradients[0].norm() > 0 and (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[0].norm()


def test_experts_are_those_of_each_context_and_can_be_used_again(new_policy: NewPolicy, actor_of: Any) -> None:
    """Others than the routers' own are replayed, for those say nothing of where they are taken from."""
    policy = new_policy("qwen3_moe")
    assert policy.routing is not None
    number, samples = policy.routing.num_experts, [trajectory(pieces, 1.0) for pieces in PIECES]
    sequences = [token_sequence(sample, actor_of()) for sample in samples]
    with torch.no_grad():
        own = response_likelihood(policy, sequences).experts
    assert own is not None
    others = [Experts(prefix=(each.prefix + 1) % number, row=(each.row + 1) % number) for each in own]
    replayed = [replace(sequence, experts=each) for sequence, each in zip(sequences, others, strict=True)]
    with torch.no_grad():
        found = response_likelihood(policy, replayed).logprobs
        expected = list[torch.Tensor]()
        for sample, experts, pieces in zip(samples, own, PIECES, strict=True):
            assert len(experts.row) == sample.num_tokens
            for first, *rest in pieces:
                mask = torch.tensor([number % 2 == 0 for number, part in enumerate(rest) for _ in part])
                row = TokenSequence(prompt_ids=first, response_ids=torch.tensor([t for part in rest for t in part]))
                (alone,) = response_likelihood(policy, [row]).experts or ()
                other = Experts(prefix=(alone.prefix + 1) % number, row=(alone.row + 1) % number)
                expected.append(response_likelihood(policy, [replace(row, experts=other)]).logprobs[mask])
        free = response_likelihood(policy, sequences).logprobs
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)
    assert not torch.allclose(found, free, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_is_said_after_a_turn_adds_its_cross_entropy_by_response_however_passes_are_cut(
    family: str, new_policy: NewPolicy, actor_of: Any, plain_logprobs: Any, gradient_of: Any
) -> None:
    policy, weight, divisors = new_policy(family), 0.3, Denominators(num_sequences=len(PIECES))
    samples = [trajectory(pieces, (-1.0) ** number) for number, pieces in enumerate(PIECES)]
    samples = [replace(sample, old_logprobs=sample.sampler_logprobs) for sample in samples]
    fields = {"importance_sampling_level": "token", "entropy_bonus": 0.2, "router_aux_loss": 0.1, **CLIP}
    without, _ = accumulated(policy, samples, actor_of(**fields), divisors, temperature=0.7)
    expected, surprises = gradient_of(policy.model), list[torch.Tensor]()
    for pieces in PIECES:
        said = []
        for context, *rest in pieces:
            is_said = torch.tensor([number % 2 == 1 for number, part in enumerate(rest) for _ in part])
            row = TokenSequence(prompt_ids=context, response_ids=torch.tensor([token for own in rest for token in own]))
            said.append(plain_logprobs(policy, [row], 0.7)[is_said])
        surprises += [-own.mean() for own in [torch.cat(said)] if len(own)]
    assert len(surprises) == 2  # nobody answers within the other two responses
    surprise = torch.stack(surprises).sum() / len(PIECES)
    (weight * surprise).backward()
    expected = expected + gradient_of(policy.model)
    for micro_batch_tokens in (1, 30, 10**6):
        actor = actor_of(observation_loss=weight, micro_batch_tokens=micro_batch_tokens, **fields)
        report, _ = accumulated(policy, samples, actor, divisors, temperature=0.7)
        assert (gradient_of(policy.model) - expected).norm() <= 1e-5 * expected.norm()
        assert report.observation_loss == pytest.approx(surprise.item(), rel=1e-5)
        assert report.loss == pytest.approx(without.loss, rel=1e-5)


def test_a_response_without_an_advantage_is_trained_on_where_what_is_said_trains(actor_of: Any) -> None:
    sample = replace(trajectory(PIECES[0], 0.0), score=Score(reward=1.0, parts={}))
    groups = [Group(samples=(sample, replace(sample, masked=True)))]
    assert trained_samples(groups, actor_of()) == []
    assert trained_samples(groups, actor_of(observation_loss=0.1)) == [sample]
