"""Dynamic sampling: groups of equal rewards give way to others, in rounds, and the order of the queries moves on."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests import samples
from tests.breaking_off import differing, recipe_of, result, train
from tests.samples import sample_of

from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.queries.order import query_indices
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.reward.reply import TrainerState
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.run.collect import collect
from gspo.run.console import Display
from gspo.run.progress import Clock, Progress
from gspo.types import Batch, Drawn, Group, Query

TINY = Path(__file__).parents[1] / "tiny.yaml"
DYNAMIC = ("rollout.dynamic_sampling=true", "rollout.max_rounds=3")
BATCH = 4  # queries a step, of two rollouts each


def order(batch: int, num_queries: int, seed: int = 0) -> list[int]:
    return query_indices(batch, num_queries=num_queries, queries_per_step=BATCH, seed=seed, shuffle=True)


class Stub:
    """A run of which only what is sampled and scored matters; the queries numbered in `flat` have equal rewards."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, query_of: Any, policy: Policy, *, flat: set[int], size: int = 40
    ) -> None:
        self.calls: list[list[int]] = []  # the numbers of the queries sampled together
        self.keys: set[SamplingKey] = set()
        self.num_rounds = 0

        def submit(prompts: Sequence[Prompt], sampling: Sampling) -> list[Future[Completion]]:
            engine.publish.assert_called_with(7)
            owners = [self.owners[prompt.key] for prompt in prompts]
            assert owners[::2] == owners[1::2] and len({prompt.key for prompt in prompts}) == len(prompts)
            self.calls.append([place for place, _ in owners[::2]])
            self.keys |= {key for _, key in owners}
            return [ended_at_once() for _ in prompts]

        engine = Mock(submit=submit, num_tokens=0)
        self.owners: dict[int, tuple[int, SamplingKey]] = {}  # of a response's key: the query's number, and the step's

        def scored(groups: Sequence[Group], functions: Any, state: Any, **_: Any) -> list[Batch]:
            pairs = [(1.0, 1.0) if number(group.query) in flat else (1.0, 0.0) for group in groups]
            assert state == TrainerState(global_step=self.progress.steps)
            batches = [samples.scored([group], pair) for group, pair in zip(groups, pairs, strict=True)]
            cost: Any = {"reward_seconds": {"f": 1.0}, "logged": {"f/x": (0.5, 2)}}  # of a round
            return [replace(batch, **cost if batch is batches[0] else {}) for batch in batches]

        monkeypatch.setattr("gspo.run.collect.score_each", scored)
        train = tuple(query_of([1], number) for number in range(size))
        queries, rows = SimpleNamespace(train=train), SimpleNamespace(num_streamed=0)
        self.sampler = Sampler(engine, policy)
        self.parts = SimpleNamespace(policy=policy, functions=(), queries=queries, rows=rows)
        self.progress = Progress()

    def collect(self, *overrides: str, step: int = 1) -> Batch:
        recipe = load_recipe(TINY, [f"rollout.queries_per_step={BATCH}", "rollout.group_size=2", *overrides])
        given: dict[str, Any] = {"clock": Clock(), "display": Display(quiet=True), "warn_once": print}
        given |= {
            "trainer_state": lambda steps: TrainerState(global_step=steps),
            "trainer": SimpleNamespace(policy_version=7),
        }
        given["progress"] = self.progress = replace(self.progress, steps=step - 1)
        run: Any = SimpleNamespace(recipe=recipe, parts=self.parts, sampler=self.sampler, source=None, **given)
        for key in (SamplingKey(seed=recipe.seed, step=place) for place in range(1, 20)):
            for query in self.parts.queries.train:
                self.owners |= dict.fromkeys(key.of_groups([query.id], 2)[0], (number(query), key))
        before, self.progress = self.progress.batches_drawn, collect(run, recipe, self.progress)
        self.num_rounds = self.progress.batches_drawn - before
        self.progress = replace(self.progress, ahead=run.source.snapshot())  # as at a safe point
        assert {*run.clock.seconds} == {"publish", "rollout", "reward"} and self.progress.batch is not None
        return self.progress.batch


def ended_at_once() -> Future[Completion]:
    future = Future[Completion]()
    tokens: Any = {"token_ids": torch.tensor([5]), "logprobs": torch.tensor([-1.0]), "full_logprobs": None}
    future.set_result(Completion(**tokens, versions=((7, 1),), finish_reason="length", experts=None))
    return future


def number(query: Query) -> int:
    return int(query.id.partition(":")[2])


def numbers(found: Batch) -> list[int]:
    return [number(group.query) for group in found.groups]


def rewards(found: Batch) -> list[float | None]:
    return [sample.reward for sample in found.samples]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, query_of: Any, new_policy: Callable[..., Policy]) -> Callable[..., Stub]:
    return partial(Stub, monkeypatch, query_of, new_policy())


def test_groups_of_equal_rewards_are_replaced_by_the_first_of_the_next_queries(stub: Any) -> None:
    first, second = order(0, 40), order(1, 40)
    run = stub(flat={first[1], first[2]})
    found = run.collect(*DYNAMIC)
    assert run.calls == [first, second[:2]]  # as many as are missing
    assert numbers(found) == [first[0], first[3], *second[:2]]
    assert rewards(found) == [1.0, 0.0] * 4 and found.reward_seconds == {"f": 2.0}
    assert found.logged == {"f/x": (1.0, 4)}  # of both rounds
    assert [number(group.query) for group in found.dropped] == [first[1], first[2]]
    assert all([sample.reward for sample in group.samples] == [1.0, 1.0] for group in found.dropped)
    assert run.keys == {SamplingKey(seed=0, step=1)} and run.num_rounds == 2


def test_where_every_group_has_signal_one_round_is_all(stub: Any) -> None:
    for flat, overrides in [(set(), DYNAMIC), ({*range(40)}, ()), ({*range(40)}, ("rollout.max_rounds=3",))]:
        run = stub(flat=flat)
        found = run.collect(*overrides)
        assert numbers(found) == order(0, 40) and found.dropped == () and found.reward_seconds == {"f": 1.0}
        assert len(run.calls) == 1 and run.num_rounds == 1


def test_groups_ahead_that_other_functions_have_scored_are_scored_again(stub: Any) -> None:
    run = stub(flat=set())
    for names, expected in (("f",), [9.0, 9.0]), (("f", "g"), [1.0, 0.0]), (("g",), [1.0, 0.0]):
        run.parts.functions = (SimpleNamespace(name="f", weight=0.0),)
        query = run.parts.queries.train[order(0, 40)[0]]
        own = replace(sample_of(query, [5]), versions=((7, 1),))
        (group,) = samples.scored([Group(samples=(own, own))], (9.0, 9.0)).groups
        ahead = Drawn(query=query, key_step=1, group=group, reward_seconds=dict.fromkeys(names, 1.0))
        run.progress = Progress(ahead=(ahead,))
        found = run.collect("rollout.max_staleness=1", "rollout.in_turn=true")
        assert rewards(found)[:2] == expected


def test_a_stream_is_taken_in_the_order_it_comes_in(stub: Any) -> None:
    run = stub(flat=set())
    run.parts.rows.num_streamed = 44
    taken = [number for step in (1, 2, 3) for number in numbers(run.collect(step=step))]
    assert taken == list(range(3 * BATCH))
    run.parts.rows.num_streamed = 0
    assert numbers(run.collect(step=1)) != taken[:BATCH]


def test_after_the_last_round_groups_of_equal_rewards_fill_the_batch_in_their_order(stub: Any) -> None:
    first, second, third = (order(batch, 40) for batch in range(3))
    run = stub(flat={*range(40)} - {second[1]})
    found = run.collect(*DYNAMIC)
    assert run.calls == [first, second, third[:3]]
    assert numbers(found) == [*first[:3], second[1]]  # the one with signal, and the first of the others
    assert rewards(found) == [1.0, 1.0] * 3 + [1.0, 0.0]
    assert [number(group.query) for group in found.dropped] == [first[3], second[0], *second[2:], *third[:3]]
    only = stub(flat={*range(40)})
    assert numbers(only.collect("rollout.dynamic_sampling=true", "rollout.max_rounds=1")) == first
    assert len(only.calls) == 1


def test_unscored_groups_have_no_signal_and_scores_stay_with_their_groups(stub: Any, monkeypatch: Any) -> None:
    first, second = order(0, 40), order(1, 40)
    run, table = stub(flat=set()), {first[0]: (None, None), first[3]: (None, 2.0)}

    def scored(groups: Sequence[Group], functions: Any, state: Any, **_: Any) -> list[Batch]:
        pairs = [table.get(number(group.query), (0.0, float(number(group.query) + 1))) for group in groups]
        return [samples.scored([group], pair) for group, pair in zip(groups, pairs, strict=True)]

    monkeypatch.setattr("gspo.run.collect.score_each", scored)
    found = run.collect(*DYNAMIC)
    assert numbers(found) == [first[1], first[2], *second[:2]]
    assert rewards(found) == [one for place in numbers(found) for one in (0.0, place + 1.0)]


@pytest.mark.parametrize("size", [5, 6, 13])
@pytest.mark.parametrize("seed", range(2))
def test_no_query_comes_twice_in_a_step_where_epochs_end_in_it_too(size: int, seed: int, stub: Any) -> None:
    run = stub(flat={*range(0, size, 2)}, size=size)
    for step in range(1, 5):
        found = run.collect(*DYNAMIC, f"seed={seed}", "rollout.max_rounds=5", step=step)
        sampled = [one for called in run.calls for one in called]
        assert len(set(sampled)) == len(sampled) and len(set(numbers(found))) == BATCH
        everything = {*numbers(found), *(number(group.query) for group in found.dropped)}
        assert everything == set(sampled)
        run.calls.clear()


@pytest.mark.parametrize("size", [6, 13, 24])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_by_difficulty_rounds_go_on_until_all_queries_were_sampled(size: int, seed: int, stub: Any) -> None:
    run = stub(flat={*range(0, size, 2)}, size=size)
    for step in range(1, 5):
        keys = ("queries.sampler=difficulty", "rollout.max_rounds=30", f"seed={seed}")
        found = run.collect(*DYNAMIC, *keys, step=step)
        sampled = [one for called in run.calls for one in called]
        assert len(set(sampled)) == len(sampled) and len(set(numbers(found))) == BATCH
        assert all(one % 2 for one in numbers(found)) or len(sampled) == size
        run.calls.clear()


def test_the_order_of_the_queries_moves_on_by_every_round(stub: Any) -> None:
    first, second = order(0, 40), order(1, 40)
    run = stub(flat={first[0], second[0]})  # the one that takes the place is flat, too: a third round
    run.collect(*DYNAMIC)
    assert run.calls == [first, second[:1], second[1:2]]
    run.calls.clear()
    run.collect(*DYNAMIC, step=2)
    assert run.calls == [[*second[2:], *order(2, 40)[:2]]]  # the rest of the last round's batch comes first


@pytest.mark.parametrize("size", [40, 42, 27])
def test_each_query_is_sampled_once_an_epoch_where_half_of_the_groups_are_equal(size: int, stub: Any) -> None:
    """Each step here goes on from what a checkpoint has: the progress."""
    run, step = stub(flat={*range(0, size, 2)}, size=size), 0
    while sum(map(len, run.calls)) < size:
        step += 1
        assert len(numbers(run.collect(*DYNAMIC, "rollout.max_rounds=9", step=step))) == BATCH
    sampled = [one for called in run.calls for one in called]
    assert sorted(sampled[:size]) == [*range(size)] and step < size / BATCH
    assert {key.step for key in run.keys} == {*range(1, step + 1)}


def test_where_there_are_no_other_queries_the_batch_is_filled_without_sampling_more(stub: Any) -> None:
    run = stub(flat={1, 2}, size=BATCH)
    assert sorted(numbers(run.collect(*DYNAMIC))) == [0, 1, 2, 3]
    assert len(run.calls) == 1


def spied(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> list[list[str]]:
    """The ids of the queries that were sampled together, call by call of the engine."""
    group, submit, asked, seen = Sampler.group, EmbeddedEngine.submit, list[str](), list[list[str]]()

    async def watched_group(sampler: Sampler, query: Query, *arguments: Any, **keywords: Any) -> Group:
        asked.append(query.id)
        return await group(sampler, query, *arguments, **keywords)

    def watched_submit(engine: EmbeddedEngine, prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        assert len(prompts) == recipe.rollout.group_size * len(asked)
        seen.append([*asked])
        asked.clear()
        return submit(engine, prompts, sampling)

    monkeypatch.setattr(Sampler, "group", watched_group)
    monkeypatch.setattr(EmbeddedEngine, "submit", watched_submit)
    train(recipe)
    return seen


def test_in_a_run_every_round_takes_the_next_queries_and_every_step_trains_on_as_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = ("evaluation.num_queries=0", "reward.0.options.pattern='7'", "queries.shuffle=false")
    seen = spied(monkeypatch, recipe_of("dynamic", *quick, *DYNAMIC))
    places = [[int(one.rpartition(":")[2]) for one in called] for called in seen]
    assert len(places) > 3 and min(map(len, places)) < 8 == max(map(len, places))
    in_all = [place - places[0][0] for called in places for place in called]
    assert in_all == [*range(len(in_all))]
    lines = [len(path.read_text().splitlines()) for path in sorted(Path("runs/dynamic/rollouts").iterdir())]
    assert len(lines) == 3 and min(lines) >= 8 * 4


def test_where_every_group_has_signal_dynamic_sampling_changes_no_bit() -> None:
    def varied(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        return [float(place + len(completion)) for place, completion in enumerate(completions)]

    base = ("reward=[]", "evaluation.num_queries=0", "steps=2")
    train(recipe_of("plain", *base), reward=varied)
    train(recipe_of("dynamic", *base, *DYNAMIC), reward=varied)
    assert differing(result("dynamic"), result("plain")) == []


def test_a_reward_that_applies_to_nothing_ends_the_run_at_its_first_step() -> None:
    with pytest.raises(UserError, match="any of the first step's 32 responses: each returned None"):
        train(recipe_of("none", "cold_start.steps=0"), reward=lambda completions, **_: [None] * len(completions))
    late = {"calls": 0}

    def judge(completions: list[str], trainer_state: TrainerState, **_: Any) -> list[float | None]:
        late["calls"] += trainer_state.global_step > 0
        return [1.0 if trainer_state.global_step == 0 else None] * len(completions)

    train(recipe_of("later", "cold_start.steps=0", "steps=2", "evaluation.num_queries=0"), reward=judge)
    assert late["calls"]
