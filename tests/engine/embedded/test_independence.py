"""A response's tokens are those of its query, number, seed and step, whatever is decoded beside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.sampling import sampler_of

from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.types import Query

NewPolicy = Callable[..., Policy]
PROMPTS = ([4, 5, 6], [7], [3, 9, 8, 4, 5, 5, 10, 11, 12], [6, 6], [4, 5, 6, 7, 8], [12], [8, 8, 9])


@pytest.fixture(params=["qwen3", "qwen3_moe", "gemma2"])
def policy(request: pytest.FixtureRequest, new_policy: NewPolicy) -> Policy:
    """Whose responses end after a few tokens, each at its own time."""
    return replace(new_policy(request.param), stop_ids=(1, 5, 9))


@pytest.fixture
def queries(query_of: Callable[..., Query]) -> list[Query]:
    return [query_of(prompt, number) for number, prompt in enumerate(PROMPTS)]


def sampled(
    policy: Policy,
    queries: Sequence[Query],
    *,
    seed: int = 0,
    step: int = 1,
    group_size: int = 3,
    max_rows: int = 512,
) -> list[list[list[int]]]:
    """The tokens of every response, group by group."""
    settings, key = RolloutConfig(max_new_tokens=24, group_size=group_size), SamplingKey(seed=seed, step=step)
    groups = sampler_of(policy, max_rows=max_rows).sample(queries, settings, key)
    return [[rollout.token_ids.tolist() for rollout in group.samples] for group in groups]


def test_other_queries_and_their_order_do_not_matter(policy: Policy, queries: list[Query]) -> None:
    together = sampled(policy, queries)
    assert len({len(ids) for group in together for ids in group}) > 5  # rows are dropped in between
    assert [sampled(policy, [query])[0] for query in queries] == together
    assert sampled(policy, queries[::-1]) == together[::-1]


@pytest.mark.parametrize("max_rows", [1, 4, 9])
def test_the_number_of_rows_does_not_matter(max_rows: int, policy: Policy, queries: list[Query]) -> None:
    assert sampled(policy, queries, max_rows=max_rows) == sampled(policy, queries)


@pytest.mark.parametrize("look_every", [1, 5])
@pytest.mark.parametrize("draw_ahead", [1, 3, 256])
@pytest.mark.parametrize("decoder", ["fast", "the modules' own"])
def test_rows_that_are_taken_over_and_numbers_drawn_ahead_do_not_matter(
    decoder: str,
    draw_ahead: int,
    look_every: int,
    new_policy: NewPolicy,
    queries: list[Query],
    refilling: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = replace(new_policy(), stop_ids=(1, 5, 9))
    expected = sampled(policy, queries)
    joined = refilling(decoder, look_every)
    monkeypatch.setattr("gspo.engine.embedded.decoding._DRAW_AHEAD", draw_ahead)
    assert sampled(policy, queries, max_rows=6) == expected
    assert joined


@pytest.mark.parametrize("group_size", [1, 2, 7])
def test_a_sample_is_the_same_in_a_smaller_and_a_larger_group(
    group_size: int, policy: Policy, queries: list[Query]
) -> None:
    smaller, larger = sampled(policy, queries, group_size=group_size), sampled(policy, queries, group_size=8)
    assert smaller == [group[:group_size] for group in larger]


def test_when_the_others_end_does_not_matter(policy: Policy, queries: list[Query]) -> None:
    """With fewer stop tokens responses go on longer: each begins with what it was."""
    longer = sampled(replace(policy, stop_ids=(1,)), queries)
    for groups in zip(sampled(policy, queries), longer, strict=True):
        assert all(long[: len(short)] == short for short, long in zip(*groups, strict=True))
    assert longer != sampled(policy, queries)


def test_seed_step_query_and_number_each_give_other_tokens(
    policy: Policy, query_of: Callable[..., Query], queries: list[Query]
) -> None:
    never = replace(policy, stop_ids=(10**9,))
    variants = [sampled(never, queries[:1], seed=seed, step=step) for seed, step in [(0, 1), (1, 1), (0, 2), (1, 0)]]
    variants.append(sampled(never, [query_of(PROMPTS[0], 99)]))  # the same prompt in another row of the data
    assert len({tuple(ids) for groups in variants for group in groups for ids in group}) == 5 * 3


def test_a_query_that_stands_twice_gets_two_groups(policy: Policy, queries: list[Query]) -> None:
    never = replace(policy, stop_ids=(10**9,))
    first, _, second = sampled(never, [queries[0], queries[1], queries[0]])
    assert first + second == sampled(never, queries[:1], group_size=6)[0]
    assert len({tuple(ids) for ids in first + second}) == 6
