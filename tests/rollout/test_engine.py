"""What every engine promises: versions, the weights that were published, a description, a stop, and an end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.model.policy import Policy, checkpoint_gradients
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.engine import Engine, SamplingKey, make_engine
from gspo.types import Group, Query

RECIPE = load_recipe(Path(__file__).parents[1] / "tiny.yaml", [])
SETTINGS = RolloutConfig(max_new_tokens=12, group_size=3)
KEY = SamplingKey(seed=0, step=1)
NewPolicy = Callable[..., Policy]


@pytest.fixture
def queries(query_of: Callable[..., Query]) -> list[Query]:
    return [query_of([4, 5, 6], 0), query_of([7], 1), query_of([3, 9, 8, 4, 5], 2)]


def tokens(groups: tuple[Group, ...]) -> list[list[list[int]]]:
    return [[rollout.token_ids.tolist() for rollout in group.samples] for group in groups]


def test_a_recipes_engine_samples_groups_in_the_order_of_the_queries(
    new_policy: NewPolicy, queries: list[Query]
) -> None:
    engine = make_engine(RECIPE, new_policy())
    assert isinstance(engine, Engine)
    groups = engine.sample(queries, SETTINGS, KEY)
    assert [group.query for group in groups] == queries and [len(group.samples) for group in groups] == [3] * 3
    assert tokens(engine.sample([], SETTINGS, KEY)) == []
    engine.close()
    engine.close()


def test_what_is_published_is_sampled_from_and_named(new_policy: NewPolicy, queries: list[Query]) -> None:
    policy = new_policy()
    engine = make_engine(RECIPE, policy)
    before = engine.sample(queries, SETTINGS, KEY)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.3)
    engine.publish(policy, 17)
    after = engine.sample(queries, SETTINGS, KEY)
    assert tokens(before) != tokens(after) == tokens(make_engine(RECIPE, policy).sample(queries, SETTINGS, KEY))
    assert {sample.versions[0][0] for group in before for sample in group.samples} == {0}
    assert {sample.versions[0][0] for group in after for sample in group.samples} == {17}


def test_an_engine_says_what_it_is(new_policy: NewPolicy) -> None:
    described = make_engine(RECIPE, new_policy("llama")).describe()
    assert described == {"engine": "embedded", "decoder written out": "True"}
    policy = new_policy("llama")
    checkpoint_gradients(policy)  # transformers would drop the cache where it trains so
    assert make_engine(RECIPE, policy).describe() == described and not policy.model.training
    assert make_engine(RECIPE, new_policy("gpt2")).describe() == {**described, "decoder written out": "False"}


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_sampling_that_is_stopped_leaves_the_engine_ready_for_the_next(
    family: str, recomputes: bool, new_policy: NewPolicy, queries: list[Query]
) -> None:
    policy = new_policy(family)
    if recomputes:
        checkpoint_gradients(policy)
    engine = make_engine(RECIPE, policy)
    expected = tokens(engine.sample(queries, SETTINGS, KEY))
    calls: list[int] = []

    def stop_at_the_fifth() -> None:
        calls.append(1)
        if len(calls) == 5:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        engine.sample(queries, SETTINGS, KEY, record_experts=True, check_stop=stop_at_the_fifth)
    assert len(calls) == 5
    assert not policy.model.training and not torch.is_inference_mode_enabled()
    assert policy.routing is None or policy.routing._trace is None
    assert tokens(engine.sample(queries, SETTINGS, KEY)) == expected


def test_a_stop_is_looked_for_at_every_token(new_policy: NewPolicy, queries: list[Query]) -> None:
    calls: list[int] = []
    engine: Any = make_engine(RECIPE, new_policy())
    groups = engine.sample(queries, SETTINGS, KEY, check_stop=lambda: calls.append(1))
    assert len(calls) == max(len(ids) for group in tokens(groups) for ids in group)


@pytest.mark.parametrize("max_rows", [3, 4, 100])
def test_the_progress_shown_rises_to_all_responses(max_rows: int, new_policy: NewPolicy, queries: list[Query]) -> None:
    shown: list[tuple[int, int, str]] = []
    settings = SETTINGS.model_copy(update={"max_rows": max_rows})
    make_engine(RECIPE, new_policy()).sample(queries, settings, KEY, show_progress=lambda *count: shown.append(count))
    assert {(total, unit.partition(",")[0]) for _, total, unit in shown} == {(9, "responses")}
    dones = [done for done, *_ in shown]
    assert dones == sorted(dones) and dones[0] < dones[-1] == 9
