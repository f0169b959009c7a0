"""The embedded engine against fresh forward passes: log-likelihoods, ends, order, seeds, and what is computed."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.sampling import generate, sample_groups

from gspo.engine.embedded.sampling import sample_tokens
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, checkpoint_gradients
from gspo.recipe.sections import RolloutConfig
from gspo.types import Sample

NewPolicy = Callable[..., Policy]
RAGGED = ([4, 5, 6], [7], [3, 9, 8, 4, 5, 5, 10, 11, 12], [6, 6])
UNIFORM = ([4, 5, 6], [7, 3, 3], [9, 8, 4])
NEVER = (10**9,)  # a stop token that no model can sample


def check_logprobs(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    groups: list[list[Sample]],
    plain_logprobs: Any,
    temperature: float = 1.0,
) -> None:
    """What the engine returned is what the model says of these responses after these prompts."""
    pairs = [(prompt, response) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    sequences = [TokenSequence(prompt_ids=tuple(prompt), response_ids=response.token_ids) for prompt, response in pairs]
    with torch.no_grad():
        expected = plain_logprobs(policy, sequences, temperature).tolist()
    found = [value for _, response in pairs for value in response.engine_logprobs.tolist()]
    assert found == pytest.approx(expected, abs=1e-5)


def check_ends(policy: Policy, groups: list[list[Sample]], max_new_tokens: int) -> list[int]:
    """A stop token ends a response and stands nowhere else; returns the lengths."""
    for response in (r for group in groups for r in group):
        assert 1 <= len(response.token_ids) <= max_new_tokens
        assert len(response.sampler_logprobs) == len(response.token_ids)
        assert not set(response.token_ids[:-1].tolist()) & set(policy.stop_ids)
        stopped = int(response.token_ids[-1]) in policy.stop_ids
        assert response.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(response.token_ids) == max_new_tokens
    return [len(response.token_ids) for group in groups for response in group]


def proven(policy: Policy) -> Policy:
    """After a first decoding, before which the engine tries out once how it can decode this model."""
    generate(policy, [[3]], RolloutConfig(max_new_tokens=1), group_size=1, seed=0)
    return policy


def values_of(groups: list[list[Sample]]) -> list[list[Any]]:
    return [[(r.token_ids.tolist(), r.sampler_logprobs.tolist(), r.finish_reason) for r in group] for group in groups]


@pytest.mark.parametrize("prompts", [RAGGED, UNIFORM], ids=["ragged", "uniform"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "gpt2", "gemma2", "mistral", "qwen2", "granite"])
def test_logprobs_are_those_of_a_fresh_forward_pass(
    family: str, prompts: Any, new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    # gemma2, mistral and qwen2 attend within a window of 4 tokens in some or all layers.
    policy = new_policy(family)
    groups = generate(policy, prompts, RolloutConfig(max_new_tokens=14, temperature=0.8), group_size=3, seed=0)
    check_logprobs(policy, prompts, groups, plain_logprobs, temperature=0.8)


def test_logprobs_of_truncated_sampling_are_those_of_the_whole_distribution(
    new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    policy = new_policy("qwen3")
    sampling = RolloutConfig(max_new_tokens=10, top_k=4, top_p=0.8, temperature=1.3)
    groups = generate(policy, RAGGED, sampling, group_size=4, seed=0)
    check_logprobs(policy, RAGGED, groups, plain_logprobs, temperature=1.3)


@pytest.mark.parametrize("prompts", [RAGGED, UNIFORM], ids=["ragged", "uniform"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mistral", "qwen2"])
def test_dropping_finished_rows_leaves_the_others_what_they_were(
    family: str, prompts: Any, new_policy: NewPolicy, plain_logprobs: Any, tokens_read: Any
) -> None:
    policy = dataclasses.replace(new_policy(family), stop_ids=(1, 5, 9))
    shapes = tokens_read(proven(policy))
    sampling = RolloutConfig(max_new_tokens=30)
    groups = generate(policy, prompts, sampling, group_size=8, seed=0)
    rows = [shape[0] for shape in shapes[1:]]
    assert rows == sorted(rows, reverse=True)
    assert len(set(rows)) >= 4  # rows were dropped several times on the way
    lengths = check_ends(policy, groups, 30)
    assert len(set(lengths)) >= 4
    check_logprobs(policy, prompts, groups, plain_logprobs)


def test_finished_rows_cost_little(new_policy: NewPolicy, tokens_read: Any) -> None:
    policy = dataclasses.replace(new_policy("llama"), stop_ids=(1, 5, 9))
    shapes = tokens_read(proven(policy))
    groups = generate(policy, UNIFORM, RolloutConfig(max_new_tokens=60), group_size=30, seed=0)
    for step, (rows, *_) in enumerate(shapes[1:]):
        alive = sum(len(response.token_ids) > step + 1 for group in groups for response in group)
        assert alive <= rows <= alive / 0.9 + 1
    assert len(shapes) == max(len(response.token_ids) for group in groups for response in group)


@pytest.mark.parametrize("prompts", [RAGGED, UNIFORM], ids=["ragged", "uniform"])
def test_a_group_reads_its_prompt_once(prompts: Any, new_policy: NewPolicy, tokens_read: Any) -> None:
    policy = dataclasses.replace(new_policy(), stop_ids=NEVER)
    shapes = tokens_read(proven(policy))
    generate(policy, prompts, RolloutConfig(max_new_tokens=5), group_size=16, seed=0)
    assert shapes[0] == (len(prompts), max(map(len, prompts)))
    assert [math.prod(shape) for shape in shapes[1:]] == [16 * len(prompts)] * 4  # the last token is not read


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
def test_without_a_stop_token_responses_have_exactly_the_most_tokens(
    max_new_tokens: int, new_policy: NewPolicy
) -> None:
    policy = dataclasses.replace(new_policy(), stop_ids=NEVER)
    groups = generate(policy, RAGGED, RolloutConfig(max_new_tokens=max_new_tokens), group_size=3, seed=0)
    assert check_ends(policy, groups, max_new_tokens) == [max_new_tokens] * 12
    assert {response.finish_reason for group in groups for response in group} == {"length"}


def test_a_stop_token_in_the_last_place_is_a_stop(new_policy: NewPolicy) -> None:
    policy = dataclasses.replace(new_policy(), stop_ids=tuple(range(len(new_policy().tokenizer))))
    groups = generate(policy, RAGGED, RolloutConfig(max_new_tokens=1), group_size=2, seed=0)
    assert check_ends(policy, groups, 1) == [1] * 8
    assert {response.finish_reason for group in groups for response in group} == {"stop"}


def test_a_prompt_that_holds_a_stop_token_is_answered_all_the_same(new_policy: NewPolicy, plain_logprobs: Any) -> None:
    policy = new_policy()
    prompts = [[4, 1, 5], [1], [0, 0, 6, 7]]  # and one that begins with padding tokens: they are read, too
    groups = generate(policy, prompts, RolloutConfig(max_new_tokens=6), group_size=3, seed=0)
    check_logprobs(policy, prompts, groups, plain_logprobs)


def test_the_seed_decides(new_policy: NewPolicy) -> None:
    policy = new_policy("qwen3_moe")
    sampling = RolloutConfig(max_new_tokens=8)
    first, again, other = (generate(policy, RAGGED, sampling, group_size=4, seed=seed) for seed in (3, 3, 4))
    assert values_of(first) == values_of(again)
    assert values_of(first) != values_of(other)


def test_the_global_random_state_has_no_part_in_it(new_policy: NewPolicy) -> None:
    policy = new_policy()
    torch.manual_seed(1)
    first = generate(policy, RAGGED, RolloutConfig(max_new_tokens=6), group_size=2, seed=0)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = generate(policy, RAGGED, RolloutConfig(max_new_tokens=6), group_size=2, seed=0)
    assert values_of(again) == values_of(first)
    assert torch.equal(torch.get_rng_state(), state)


def test_responses_of_a_group_differ(new_policy: NewPolicy) -> None:
    (group,) = generate(new_policy(), [[4, 5]], RolloutConfig(max_new_tokens=12), group_size=8, seed=0)
    assert len({tuple(response.token_ids.tolist()) for response in group}) == 8


@pytest.mark.parametrize("max_rows", [1, 4, 9, 1000])
def test_many_queries_are_answered_in_waves_and_in_order(
    max_rows: int, new_policy: NewPolicy, plain_logprobs: Any, tokens_read: Any
) -> None:
    policy = new_policy()
    prompts = [[4 + n, *[3 + n] * (n % 4)] for n in range(7)]
    shapes = tokens_read(proven(policy))
    groups = generate(policy, prompts, RolloutConfig(max_new_tokens=6, max_rows=max_rows), group_size=4, seed=0)
    assert [len(group) for group in groups] == [4] * 7
    assert max(rows for rows, *_ in shapes) <= max(max_rows, 4)  # a group is never split
    shapes.clear()
    check_logprobs(policy, prompts, groups, plain_logprobs)
    assert len({tuple(r.token_ids.tolist()) for group in groups for r in group}) > 20  # waves do not repeat each other


def test_no_queries_have_no_answers(new_policy: NewPolicy) -> None:
    assert generate(new_policy(), [], RolloutConfig(max_new_tokens=4), group_size=2, seed=0) == []


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "llama"])
def test_decoding_leaves_the_policy_ready_to_train(family: str, new_policy: NewPolicy, plain_logprobs: Any) -> None:
    policy = new_policy(family)
    before = [p.detach().clone() for p in policy.model.parameters()]
    sampling = RolloutConfig(max_new_tokens=6, top_k=20, repetition_penalty=1.1)
    for response in (own for group in generate(policy, RAGGED, sampling, group_size=2, seed=0) for own in group):
        tensors = (response.token_ids, response.sampler_logprobs, response.engine_logprobs)
        assert not any(tensor.is_inference() for tensor in tensors)
    assert all(torch.equal(p, q) for p, q in zip(policy.model.parameters(), before, strict=True))
    sequences = [TokenSequence(prompt_ids=(4, 5), response_ids=torch.tensor([6, 7, 8]))]
    plain_logprobs(policy, sequences).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.model.parameters() if p.grad is not None)


def test_gradient_checkpointing_leaves_the_rollouts_right(new_policy: NewPolicy, plain_logprobs: Any) -> None:
    policy = new_policy()
    checkpoint_gradients(policy)
    groups = generate(policy, RAGGED, RolloutConfig(max_new_tokens=8), group_size=3, seed=0)
    check_logprobs(policy, RAGGED, groups, plain_logprobs)


def test_groups_carry_their_query_text_and_provenance(new_policy: NewPolicy, query_of: Any) -> None:
    policy = dataclasses.replace(new_policy(), stop_ids=(1, 5, 9))
    queries = [query_of(prompt, number) for number, prompt in enumerate(RAGGED)]
    sampling = RolloutConfig(max_new_tokens=12)
    groups = sample_groups(policy, queries, sampling, group_size=3, seed=5, policy_version=17)
    expected = generate(policy, RAGGED, sampling, group_size=3, seed=5)
    assert [group.query for group in groups] == queries
    for group, responses in zip(groups, expected, strict=True):
        sampled = [(s.token_ids.tolist(), s.sampler_logprobs.tolist(), s.finish_reason) for s in group.samples]
        assert [sampled] == values_of([responses])
        for rollout in group.samples:
            assert rollout.versions == ((17, rollout.num_tokens),) and rollout.loss_mask.all()
            written = policy.tokenizer.decode(rollout.token_ids)
            assert rollout.text == written.removesuffix("<eos>")  # the other two ends are words
            assert "<eos>" not in rollout.text


@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
def test_an_interrupted_decoding_leaves_the_model_as_it_was(training: bool, new_policy: NewPolicy) -> None:
    policy = new_policy()
    policy.model.train(training)
    reads: list[int] = []

    def interrupt(*arguments: Any) -> None:
        reads.append(1)
        if len(reads) == 3:
            raise MemoryError

    def state() -> list[Any]:
        swapped = [name for name, module in policy.model.named_modules() if "forward" in vars(module)]
        return [policy.model.training, policy.model.config._attn_implementation, swapped]

    before = state()
    policy.model.get_input_embeddings().register_forward_hook(interrupt)
    with pytest.raises(MemoryError):
        generate(policy, RAGGED, RolloutConfig(max_new_tokens=8), group_size=2, seed=0)
    assert len(reads) == 3
    assert state() == before
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_half_precision_decoding_is_close_to_a_fresh_forward_pass(
    family: str, new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    policy = new_policy(family, dtype="bfloat16", initializer_range=0.1)
    groups = generate(policy, RAGGED, RolloutConfig(max_new_tokens=8), group_size=4, seed=0)
    pairs = [(prompt, r) for prompt, group in zip(RAGGED, groups, strict=True) for r in group]
    with torch.no_grad():
        expected = plain_logprobs(
            policy, [TokenSequence(prompt_ids=tuple(p), response_ids=r.token_ids) for p, r in pairs]
        )
    gaps = (torch.tensor([value for _, r in pairs for value in r.sampler_logprobs.tolist()]) - expected).abs()
    assert gaps.mean() < 0.02


def test_equal_prompts_of_several_queries_stay_within_max_rows(
    new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def noted(logits: Any, *given: Any, **named: Any) -> Any:
        widths.append(len(logits))
        return sample_tokens(logits, *given, **named)

    monkeypatch.setattr("gspo.engine.embedded.decoding.sample_tokens", noted)
    generate(new_policy(), [[5, 6, 7]] * 10, RolloutConfig(max_new_tokens=3, max_rows=4), group_size=1, seed=0)
    assert max(widths) == 4
