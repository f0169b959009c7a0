"""What every engine promises: versions, the weights that were published, a description, a stop, and an end."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sampling import sampler_of

from gspo.engine.engine import Engine
from gspo.engine.make import make_engine
from gspo.errors import Stopped
from gspo.interrupt import Interrupt
from gspo.model.policy import Policy, checkpoint_gradients
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Group, Query

RECIPE = load_recipe(Path(__file__).parents[1] / "tiny.yaml", [])
SETTINGS = RolloutConfig(max_new_tokens=12, group_size=3)
LONG = RolloutConfig(max_new_tokens=100, group_size=3)
KEY = SamplingKey(seed=0, step=1)
NewPolicy = Callable[..., Policy]


@pytest.fixture
def queries(query_of: Callable[..., Query]) -> list[Query]:
    return [query_of([4, 5, 6], 0), query_of([7], 1), query_of([3, 9, 8, 4, 5], 2)]


def tokens(groups: tuple[Group, ...]) -> list[list[list[int]]]:
    return [[rollout.token_ids.tolist() for rollout in group.samples] for group in groups]


def made(policy: Policy) -> Sampler:
    return Sampler(make_engine(RECIPE, policy), policy)


def test_a_recipes_engine_samples_groups_in_the_order_of_the_queries(
    new_policy: NewPolicy, queries: list[Query]
) -> None:
    sampler = made(new_policy())
    assert isinstance(sampler.engine, Engine)
    groups = sampler.sample(queries, SETTINGS, KEY)
    assert [group.query for group in groups] == queries and [len(group.samples) for group in groups] == [3] * 3
    assert tokens(sampler.sample([], SETTINGS, KEY)) == []
    sampler.engine.close()
    sampler.engine.close()


def test_what_is_published_is_sampled_from_and_named(new_policy: NewPolicy, queries: list[Query]) -> None:
    policy = new_policy()
    sampler = made(policy)
    before = sampler.sample(queries, SETTINGS, KEY)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.3)
    sampler.publish(17)
    after = sampler.sample(queries, SETTINGS, KEY)
    assert tokens(before) != tokens(after) == tokens(made(policy).sample(queries, SETTINGS, KEY))
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
    family: str, recomputes: bool, new_policy: NewPolicy, queries: list[Query], tokens_read: Any
) -> None:
    policy = new_policy(family)
    if recomputes:
        checkpoint_gradients(policy)
    sampler, shapes = made(policy), tokens_read(policy)
    expected = tokens(sampler.sample(queries, SETTINGS, KEY))
    num_reads = len(shapes)
    shapes.clear()

    interrupt = Interrupt(lambda _: None)

    def stop_at_the_fifth(*_: Any) -> None:
        if len(shapes) == 5:
            interrupt.signal = signal.SIGTERM

    policy.model.get_input_embeddings().register_forward_hook(stop_at_the_fifth)
    with interrupt, pytest.raises(Stopped):
        sampler.sample(queries, LONG, KEY, record_experts=True)
    assert tokens(sampler.sample(queries, SETTINGS, KEY)) == expected
    assert len(shapes) == 5 + num_reads  # no further token was sampled of what is given up
    assert not policy.model.training and not torch.is_inference_mode_enabled()
    assert policy.routing is None or policy.routing._trace is None


def test_progress_is_shown_before_each_token_though_the_thread_that_waits_decodes(
    new_policy: NewPolicy, queries: list[Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.loop.LOOK_SECONDS", 0.0)
    shown, policy, threads = list[str](), new_policy(), set[int]()
    policy.model.get_input_embeddings().register_forward_hook(lambda *_: threads.add(threading.get_ident()))
    made(policy).sample(queries, SETTINGS, KEY, show_progress=lambda done, total, unit: shown.append(unit))
    numbers_of_tokens = {unit.split(", ")[1].split()[0] for unit in shown}
    assert len(numbers_of_tokens) >= SETTINGS.max_new_tokens
    assert threads == {threading.get_ident()}  # another would have OpenMP threads of its own: see loop.py


@pytest.mark.parametrize("max_rows", [3, 4, 100])
def test_the_progress_shown_rises_to_all_responses(max_rows: int, new_policy: NewPolicy, queries: list[Query]) -> None:
    shown: list[tuple[int, int, str]] = []
    sampler = sampler_of(new_policy(), max_rows=max_rows)
    sampler.sample(queries, SETTINGS, KEY, show_progress=lambda *count: shown.append(count))
    assert {(total, unit.partition(",")[0]) for _, total, unit in shown} == {(9, "responses")}
    dones = [done for done, *_ in shown]
    assert dones == sorted(dones) and dones[0] < dones[-1] == 9
