"""The experts recorded while responses are sampled are those of a fresh pass over prompt and response."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.mixtures import MIXTURES, live_experts, sets
from tests.sampling import generate, sample_groups

from gspo.engine.embedded.transcript import Transcript
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.types import Sample

NewPolicy = Callable[..., Policy]
RAGGED = ([4, 5, 6], [7], [3, 9, 8, 4, 5, 5, 10, 11, 12], [6, 6])
UNIFORM = ([4, 5, 6], [7, 3, 3], [9, 8, 4])


def mixture(new_policy: NewPolicy, family: str) -> Policy:
    """One whose responses end after a few tokens, each at its own time."""
    return replace(new_policy(family, **MIXTURES[family]), stop_ids=(1, 5, 9))


def check(policy: Policy, prompts: Any, groups: list[list[Sample]]) -> set[int]:
    """Against plain passes; returns the lengths of the responses."""
    assert policy.routing is not None
    for prompt, group in zip(prompts, groups, strict=True):
        assert group[0].experts is not None
        for response in group:
            own = response.experts
            assert own is not None and own.prefix is group[0].experts.prefix
            assert own.row.shape == (len(response.token_ids), policy.routing.num_layers, 2)
            assert own.prefix.shape == (len(prompt) - 1, policy.routing.num_layers, 2)
            assert own.row.dtype == own.prefix.dtype == torch.uint8
            assert own.row.untyped_storage().nbytes() == own.row.nbytes  # it keeps nothing else alive
            assert not own.row.is_inference() and not own.prefix.is_inference()
            sequence = TokenSequence(prompt_ids=tuple(prompt), response_ids=response.token_ids)
            assert sets(own) == sets(live_experts(policy, sequence))
    return {len(response.token_ids) for group in groups for response in group}


@pytest.mark.parametrize(
    ("family", "prompts"),
    [*((family, RAGGED) for family in MIXTURES), ("qwen3_moe", UNIFORM), ("gpt_oss", UNIFORM)],
)
def test_recorded_experts_are_those_of_a_fresh_pass(family: str, prompts: Any, new_policy: NewPolicy) -> None:
    policy = mixture(new_policy, family)
    groups = generate(policy, prompts, RolloutConfig(max_new_tokens=16), group_size=4, seed=0, record_experts=True)
    assert len(check(policy, prompts, groups)) >= 4  # rows were dropped on the way


@pytest.mark.parametrize(
    ("family", "decoder", "look_every"),
    [
        ("qwen3_moe", "fast", 1),
        ("qwen3_moe", "fast", 5),
        ("qwen3_moe", "the modules' own", 5),
        ("mixtral", "fast", 5),
        ("mixtral", "the modules' own", 1),
    ],
)
def test_rows_that_are_taken_over_keep_their_own_experts(
    family: str, decoder: str, look_every: int, new_policy: NewPolicy, refilling: Any
) -> None:
    joined = refilling(decoder, look_every)
    policy, rng = mixture(new_policy, family), random.Random(0)
    prompts = [[rng.randrange(9, 20) for _ in range(rng.randint(1, 12))] for _ in range(6)]
    sampling = RolloutConfig(max_new_tokens=14, max_rows=6)
    groups = generate(policy, prompts, sampling, group_size=3, seed=1, record_experts=True)
    assert len(check(policy, prompts, groups)) > 3
    assert joined  # rows were taken over while others were under way


@pytest.mark.parametrize(("family", "max_rows"), [("qwen3_moe", 1), ("qwen3_moe", 9), ("gpt_oss", 9)])
def test_in_waves_every_response_has_its_own_experts(family: str, max_rows: int, new_policy: NewPolicy) -> None:
    policy = mixture(new_policy, family)
    sampling = RolloutConfig(max_new_tokens=6, max_rows=max_rows)
    prompts = [[4 + n, *[3 + n] * (n % 4)] for n in range(5)]
    groups = generate(policy, prompts, sampling, group_size=4, seed=0, record_experts=True)
    check(policy, prompts, groups)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_recording_changes_nothing_of_what_is_sampled(family: str, new_policy: NewPolicy) -> None:
    policy = mixture(new_policy, family)

    def sampled(record: bool) -> list[Any]:
        groups = generate(policy, RAGGED, RolloutConfig(max_new_tokens=9), group_size=3, seed=2, record_experts=record)
        responses = [response for group in groups for response in group]
        assert all((response.experts is not None) == record for response in responses)
        return [(one.token_ids.tolist(), one.sampler_logprobs.tolist(), one.finish_reason) for one in responses]

    assert sampled(True) == sampled(False)


def test_a_dense_model_has_no_experts_to_record(new_policy: NewPolicy) -> None:
    (group,) = generate(new_policy(), [[4]], RolloutConfig(max_new_tokens=3), group_size=2, seed=0, record_experts=True)
    assert [response.experts for response in group] == [None, None]


def test_rollouts_carry_what_was_recorded(new_policy: NewPolicy, query_of: Any) -> None:
    policy = mixture(new_policy, "qwen3_moe")
    queries = [query_of(prompt, number) for number, prompt in enumerate(RAGGED)]
    for record in (True, False):
        groups = sample_groups(
            policy,
            queries,
            RolloutConfig(max_new_tokens=5),
            group_size=2,
            seed=0,
            policy_version=0,
            record_experts=record,
        )
        for group in groups:
            for rollout in group.samples:
                assert (rollout.experts is not None) == record
                assert rollout.experts is None or len(rollout.experts.row) == rollout.num_tokens
                assert rollout.experts is None or len(rollout.experts.prefix) == len(group.query.prompt_ids) - 1


def test_a_transcript_gives_each_response_its_own_rows_and_its_prompts_prefix() -> None:
    """Two groups of two; what is recorded is the number of the response and of the position."""
    transcript = Transcript()
    stops = {(1, 0), (2, 1)}

    def sample(*places: tuple[int, int]) -> None:
        token = torch.tensor([9 if place in stops else 5 for place in places])
        experts = torch.tensor([[place] for place in places], dtype=torch.uint8)
        transcript.add(torch.tensor(places)[:, 0], token, torch.zeros(len(places)), None, experts)

    transcript.prefixes |= dict.fromkeys((0, 1), torch.full((2, 1, 2), 7, dtype=torch.uint8))
    transcript.prefixes |= dict.fromkeys((2, 3), torch.zeros(0, 1, 2, dtype=torch.uint8))
    sample((0, 0), (1, 0), (2, 0))
    sample((0, 1), (1, 1), (2, 1))  # the second response samples on after its end
    sample((3, 0), (0, 2))
    sample((3, 1))
    sample((3, 2))
    completions = transcript.completions(range(4), [9], {})
    recorded = [own.experts for own in completions if own.experts is not None]
    assert [experts.row[:, 0].tolist() for experts in recorded] == [
        [[0, 0], [0, 1], [0, 2]],
        [[1, 0]],
        [[2, 0], [2, 1]],
        [[3, 0], [3, 1], [3, 2]],
    ]
    assert [len(experts.prefix) for experts in recorded] == [2, 2, 0, 0]
