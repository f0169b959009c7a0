"""What routers are seen to choose, and that what is replayed is what they are told, for this pass and no other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.mixtures import MIXTURES, live_experts, random_experts, router_calls, routers_of, sets
from tests.sampling import generate

from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.model.routing import Routing
from gspo.recipe.sections import RolloutConfig

NewPolicy = Callable[..., Policy]
PADDED = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
RUNS = [*((family, True) for family in MIXTURES if family != "gpt_oss"), *((family, False) for family in PADDED)]


@pytest.fixture
def mixture(new_policy: NewPolicy) -> NewPolicy:
    """A policy of one of MIXTURES; where `packs` is false, one that reads its sequences padded."""

    def build(family: str, packs: bool = True, **changes: Any) -> Policy:
        policy = new_policy(family, **{**MIXTURES[family], **changes})
        assert policy.supports_packing == (family != "gpt_oss")
        return replace(policy, supports_packing=packs)

    return build


@pytest.fixture
def sequences_of(ragged_sequences: Any) -> Callable[[Policy], list[TokenSequence]]:
    """Sequences of unequal lengths, and a group with a prompt so long that it is shared."""

    def build(policy: Policy) -> list[TokenSequence]:
        ragged: list[TokenSequence] = ragged_sequences(7, vocabulary=len(policy.tokenizer), seed=3)
        prompt = tuple(range(3, 16))
        group = [TokenSequence(prompt_ids=prompt, response_ids=torch.arange(4, 4 + n)) for n in (3, 1, 6)]
        return [*ragged[:3], *group, *ragged[3:]]

    return build


def routing_of(policy: Policy) -> Routing:
    assert policy.routing is not None
    return policy.routing


@pytest.mark.parametrize(("family", "packs"), RUNS)
def test_what_is_recorded_are_the_experts_of_each_sequences_own_pass(
    family: str, packs: bool, mixture: NewPolicy, sequences_of: Any
) -> None:
    policy = mixture(family, packs)
    sequences = sequences_of(policy)
    with torch.no_grad():
        recorded = response_likelihood(policy, sequences).experts
    assert recorded is not None
    seen: set[str] = set()
    for sequence, own in zip(sequences, recorded, strict=True):
        assert own.row.shape == (len(sequence.response_ids), routing_of(policy).num_layers, 2)
        assert own.prefix.shape == (len(sequence.prompt_ids) - 1, routing_of(policy).num_layers, 2)
        assert own.row.dtype == own.prefix.dtype == torch.uint8 and own.row.device.type == "cpu"
        assert not own.row.requires_grad
        assert sets(own) == sets(live_experts(policy, sequence))
        seen |= {str(experts) for token in sets(own) for experts in token}
    assert len(seen) > 5  # the routers are not so flat that they would always choose the same
    shared = {own.prefix.data_ptr() for own in recorded[3:6]}
    assert len(shared) == (1 if packs else 3)  # what is read once is kept once


@pytest.mark.parametrize(("family", "packs"), RUNS)
def test_replaying_what_was_recorded_changes_no_bit(
    family: str, packs: bool, mixture: NewPolicy, sequences_of: Any, gradient_of: Any
) -> None:
    policy = mixture(family, packs)
    sequences = sequences_of(policy)
    live = response_likelihood(policy, sequences)
    live.logprobs.sum().backward()
    expected = gradient_of(policy.model)
    assert live.experts is not None
    own = [replace(one, experts=experts) for one, experts in zip(sequences, live.experts, strict=True)]
    replayed = response_likelihood(policy, own)
    if packs:
        assert torch.equal(replayed.logprobs, live.logprobs)
    else:  # padding goes elsewhere, and experts that read other numbers of tokens round differently
        torch.testing.assert_close(replayed.logprobs, live.logprobs, rtol=0, atol=1e-5)
        alone = [response_likelihood(policy, [one]).logprobs for one in (sequences[4], own[4])]  # not padded
        assert torch.equal(*alone)
    assert replayed.experts is not None
    assert [sets(one) for one in replayed.experts] == [sets(one) for one in live.experts]
    replayed.logprobs.sum().backward()
    assert (gradient_of(policy.model) - expected).norm() <= 1e-6 * expected.norm()


def softmax_first(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1).gather(1, experts)


def normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


WEIGHTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "qwen3_moe": lambda logits, experts: normalised(softmax_first(logits, experts)),
    "qwen2_moe": softmax_first,
    "mixtral": lambda logits, experts: normalised(softmax_first(logits, experts)),
    "olmoe": softmax_first,
    "gpt_oss": lambda logits, experts: logits.gather(1, experts).softmax(-1),
    "deepseek_v3": lambda logits, experts: 1.7 * normalised(logits.sigmoid().gather(1, experts)),
}


@pytest.mark.parametrize(("family", "packs"), RUNS)
def test_other_experts_are_used_as_told_with_weights_from_the_live_logits(
    family: str, packs: bool, mixture: NewPolicy, sequences_of: Any
) -> None:
    policy = mixture(family, packs)
    if family == "gpt_oss":
        for router in routers_of(policy):
            torch.nn.init.normal_(router.bias)
    sequences = random_experts(policy, sequences_of(policy))
    told = [sequence.experts for sequence in sequences if sequence.experts is not None]
    with torch.no_grad(), router_calls(policy) as calls:
        found = response_likelihood(policy, sequences)
    assert found.experts is not None
    used = {layer: output[2] for layer, _, output in calls[-routing_of(policy).num_layers :]}
    for layer, given, (logits, weights, experts) in calls:
        router = routers_of(policy)[layer]
        own = F.linear(given.reshape(-1, given.shape[-1]), router.weight, getattr(router, "bias", None))
        torch.testing.assert_close(logits, own)
        torch.testing.assert_close(weights, WEIGHTS[family](own, experts))
    total = sum(len(output[2]) for layer, _, output in calls if layer == 0)
    # Each sequence's own experts were used, as often as its tokens are read: those of a shared prompt once.
    tokens = [sequence.num_tokens - 1 for sequence in sequences]
    assert total == sum(tokens) - 2 * 12 if packs else total >= sum(tokens)
    if packs:
        pieces = [told[3].prefix, *(one.row for one in told[3:6])]
        for layer, chosen in used.items():
            expected = torch.cat([piece[:, layer] for piece in pieces]).long()
            assert torch.equal(chosen[: len(expected)], expected)  # the group that shares its prompt comes first
    # What is recorded under replay is what the live router would have chosen, which is not what it was told.
    assert all(sets(own) != sets(other) for own, other in zip(found.experts, told, strict=True))
    for sequence, recorded in zip(sequences, found.experts, strict=True):
        live = live_experts(policy, sequence)
        assert [token[0] for token in sets(recorded)] == [token[0] for token in sets(live)]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_replayed_pass_leaves_the_next_ones_as_they_were(family: str, mixture: NewPolicy, sequences_of: Any) -> None:
    policy = mixture(family, family != "gpt_oss")
    sequences = sequences_of(policy)
    sampling = RolloutConfig(max_new_tokens=5)

    def passes() -> list[torch.Tensor]:
        with torch.no_grad():
            plain = policy.model(input_ids=torch.arange(2, 12)[None], use_cache=False).logits
            logprobs = response_likelihood(policy, sequences).logprobs
        groups = generate(policy, [[3, 4], [5]], sampling, group_size=2, seed=0, record_experts=True)
        return [plain, logprobs, *(response.sampler_logprobs for group in groups for response in group)]

    before = passes()
    told = random_experts(policy, sequences)
    replayed = response_likelihood(policy, told).logprobs
    assert not torch.allclose(replayed, before[1], atol=0.1)
    replayed.sum().backward()
    assert all(map(torch.equal, passes(), before))


@pytest.mark.parametrize("place", ["embedding", "router", "last layer"])
def test_a_pass_that_fails_leaves_no_replay_behind(
    place: str, mixture: NewPolicy, sequences_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = mixture("qwen3_moe")
    sequences = sequences_of(policy)
    told = random_experts(policy, sequences)
    ids = torch.arange(2, 12)[None]
    expected, plain = response_likelihood(policy, sequences).logprobs, policy.model(input_ids=ids).logits

    def fail(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    modules = {"embedding": policy.model.get_input_embeddings(), "last layer": policy.trunk.layers[-1]}
    with monkeypatch.context() as patch:
        hooks = [modules[place].register_forward_pre_hook(fail)] if place in modules else []
        if place == "router":
            patch.setattr("torch.nn.functional.softmax", fail)  # within the second router, whose topk is replaced
        with pytest.raises(KeyboardInterrupt):
            response_likelihood(policy, told)
        for hook in hooks:
            hook.remove()
    assert torch.equal(policy.model(input_ids=ids).logits, plain)
    assert torch.equal(response_likelihood(policy, sequences).logprobs, expected)
    scores = torch.tensor([[3.0, 1.0, 2.0, 5.0, 4.0]])
    assert torch.topk(scores, 2).indices.tolist() == [[3, 4]]


def test_a_trace_within_a_trace_gives_it_back(mixture: NewPolicy) -> None:
    policy = mixture("qwen3_moe")
    routing, ids = routing_of(policy), torch.arange(2, 8)[None]
    told = random_experts(policy, [TokenSequence(prompt_ids=(1,), response_ids=ids[0])])[0].experts
    assert told is not None

    def hidden() -> torch.Tensor:
        states: torch.Tensor = policy.trunk(input_ids=ids, use_cache=False).last_hidden_state
        return states

    with torch.no_grad():
        plain = hidden()
        with routing.traced(told.row) as outer:
            replayed = hidden()
            with routing.traced():
                assert torch.equal(hidden(), plain)
            assert torch.equal(hidden(), replayed)
        assert torch.equal(hidden(), plain)
    assert not torch.allclose(plain, replayed)
    assert outer.experts.shape == (6, 3, 2) and outer.logits == {}
