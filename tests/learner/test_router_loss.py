"""The router auxiliary loss in an update: a part of each sequence's loss, however the mini-batch is cut or kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.mixtures import MIXTURES, random_experts, router_calls
from tests.samples import accumulated, sample_from
from torch import Tensor

from gspo.learner.loss import Denominators
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, checkpoint_gradients

NewPolicy = Callable[..., Policy]
COEFFICIENT = 0.3
RUNS = [
    *(("qwen3_moe", True, kept, replays) for kept in (True, False) for replays in (True, False)),
    *(("qwen3_moe", False, kept, not kept) for kept in (True, False)),
    ("gpt_oss", False, True, True),
    ("deepseek_v3", True, False, True),
]


def sequences_of(policy: Policy, ragged_sequences: Any, replays: bool) -> list[TokenSequence]:
    """Some of them a group whose prompt is shared."""
    ragged = ragged_sequences(4, vocabulary=len(policy.tokenizer), seed=2, longest=12)
    group = [TokenSequence(prompt_ids=tuple(range(3, 16)), response_ids=torch.arange(4, 4 + n)) for n in (3, 1, 6)]
    told = random_experts(policy, [*ragged[:2], *group, *ragged[2:]])
    return told if replays else [replace(one, experts=None) for one in told]


def balance(policy: Policy, sequence: TokenSequence) -> tuple[Tensor, Tensor]:
    """Mean response log-likelihood and E/K · Σ_e f_e P_e over the tokens the response is predicted from, one pass."""
    routing, ids = policy.routing, torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    assert routing is not None
    told = None if sequence.experts is None else torch.cat([sequence.experts.prefix, sequence.experts.row])
    with router_calls(policy) as calls, routing.traced(told):
        table = policy.model(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    start, losses = len(sequence.prompt_ids) - 1, []
    for _, _, (logits, _, chosen) in calls:
        share = torch.zeros(routing.num_experts)
        for expert in chosen[start:].flatten().tolist():
            share[expert] += 1 / len(sequence.response_ids)
        losses.append((share * logits[start:].softmax(-1).mean(0)).sum() * routing.num_experts / routing.top_k)
    logprobs = table[start:].gather(1, sequence.response_ids[:, None])
    return logprobs.mean(), torch.stack(losses).mean()


@pytest.mark.parametrize(("family", "packs", "kept", "replays"), RUNS)
def test_loss_and_gradient_are_those_of_the_sequences_one_by_one(
    family: str,
    packs: bool,
    kept: bool,
    replays: bool,
    new_policy: NewPolicy,
    ragged_sequences: Any,
    actor_of: Any,
    gradient_of: Any,
) -> None:
    plain = new_policy(family, **MIXTURES[family])
    policy = replace(new_policy(family, **MIXTURES[family]), supports_packing=packs)
    if not kept:
        checkpoint_gradients(policy)
    sequences = sequences_of(plain, ragged_sequences, replays)
    loss, even, surrogate = torch.zeros(()), torch.zeros(()), 0.0
    items, replay = [], "engine" if replays else "none"
    for index, sequence in enumerate(sequences):
        advantage = (-1.0) ** index
        mean, own = balance(plain, sequence)
        even = even + own / len(sequences)
        surrogate -= advantage / 10  # every ratio is 1
        loss = loss - advantage * (mean - mean.detach()).exp() / 10 + COEFFICIENT * own / 10
        items.append(sample_from(sequence, advantage=advantage))
    loss.backward()
    expected = gradient_of(plain.model)
    for micro_batch_tokens in (20, 10**6):
        actor = actor_of(router_aux_loss=COEFFICIENT, micro_batch_tokens=micro_batch_tokens, routing_replay=replay)
        seen, _ = accumulated(policy, items, actor, Denominators(num_sequences=10))
        assert seen.loss == pytest.approx(surrogate, abs=1e-6)
        assert seen.balance_loss == pytest.approx(even.item(), rel=1e-4)
        assert (gradient_of(policy.model) - expected).norm() <= 1e-5 * expected.norm()
    accumulated(policy, items, actor_of(routing_replay=replay), Denominators(num_sequences=10))
    assert (gradient_of(policy.model) - expected).norm() > 1e-2 * expected.norm()  # the loss has a part in it


@pytest.mark.parametrize("old", [-9.0, -99.0], ids=["far", "so far that the ratio is infinite"])
def test_where_all_is_clipped_the_routers_still_learn_to_share(
    old: float, new_policy: NewPolicy, ragged_sequences: Any, actor_of: Any, gradient_of: Any
) -> None:
    policy = new_policy("qwen3_moe", **MIXTURES["qwen3_moe"])
    sequences = sequences_of(policy, ragged_sequences, replays=True)
    expected = torch.zeros(())
    for sequence in sequences:
        expected = expected + COEFFICIENT * balance(policy, sequence)[1] / len(sequences)
    expected.backward()
    gradient = gradient_of(policy.model)
    items = [
        sample_from(sequence, advantage=1.0, old_logprobs=torch.full((len(sequence.response_ids),), old))
        for sequence in sequences
    ]
    actor = actor_of(router_aux_loss=COEFFICIENT, routing_replay="engine")
    _, stats = accumulated(policy, items, actor, Denominators(num_sequences=len(items)))
    assert all(own.num_clipped == own.num_tokens for own in stats)
    assert (gradient_of(policy.model) - gradient).norm() <= 1e-5 * gradient.norm()
    accumulated(policy, items, actor_of(routing_replay="engine"), Denominators(num_sequences=len(items)))
    assert gradient_of(policy.model).norm() == 0
