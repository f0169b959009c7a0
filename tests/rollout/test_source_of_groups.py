"""What the source keeps in flight, in which order it hands it over, and what becomes of what is too old."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.samples import query_of, sample_of

from gspo import loop
from gspo.engine.engine import LostError
from gspo.errors import RunError, Stopped, UserError
from gspo.queries.order import query_indices
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.rollout.source import Source
from gspo.types import Batch, Drawn, Failure, Group, Query, Score

SIZE, UPDATES = 3, 2  # queries a step, and updates
STEPS = 9


class NotingSampler(Sampler):
    """Samples with the weights of a number of steps, and notes which queries with the random numbers of which step."""

    engine = Mock(num_tokens=0)

    def __init__(self) -> None:
        self.steps = 0
        self.asked: list[tuple[str, int]] = []

    async def group(self, query: Query, settings: Any, keys: Sequence[int], **_: Any) -> Group:
        self.asked.append((query.id, step_of(query, keys)))
        return self.made(query)

    def made(self, query: Query) -> Group:
        version = self.steps * UPDATES
        sample = replace(sample_of(query, [4, 5]), versions=((version, 1), (version, 1)))
        return Group(samples=(sample, sample))


def step_of(query: Query, keys: Sequence[int]) -> int:
    for step in range(1, 100):
        if [*keys] in SamplingKey(seed=0, step=step).of_groups([query.id] * 2, len(keys)):
            return step
    raise AssertionError("keys of no step")


class Run:
    """Steps that take all their groups from a source; queries are numbered in their order."""

    def __init__(self, max_staleness: int, too_old: Any = "drop") -> None:
        self.sampler, self.batches_drawn, self.steps = NotingSampler(), 0, 0
        self.ahead: list[Drawn] = []
        self.sampling = RolloutConfig(queries_per_step=SIZE, max_staleness=max_staleness, too_old=too_old, in_turn=True)

    def source(self) -> Source:
        self.sampler.steps = self.steps
        return Source(
            sampler=self.sampler,
            sampling=self.sampling,
            steps=self.steps,
            version=self.steps * UPDATES,
            steps_left=STEPS - self.steps - 1,
            updates_per_step=UPDATES,
            seed=0,
            queries_of=lambda batch: [query_of([1], number) for number in range(batch * SIZE, (batch + 1) * SIZE)],
            batches_drawn=self.batches_drawn,
            ahead=self.ahead,
        )

    def keep(self, source: Source) -> None:
        self.batches_drawn, self.ahead = source.batches_drawn, source.ahead

    def step(self) -> list[Group]:
        source = self.source()
        groups = taken(source)
        self.keep(source)
        self.steps += 1
        return groups


def ages(groups: Sequence[Group], steps: int) -> set[int]:
    return {steps - version // UPDATES for own in groups for sample in own.samples for version, _ in sample.versions}


def numbers(groups: Sequence[Group]) -> list[int]:
    return [int(group.query.id.partition(":")[2]) for group in groups]


def drawn(source: Source, number: int = SIZE, before: Sequence[Group] = (), look: Any = lambda: None) -> list[Drawn]:
    return loop.run(source.next_groups(number, before), look)


def taken(source: Source, number: int = SIZE, before: Sequence[Group] = ()) -> list[Group]:
    return [own.group for own in drawn(source, number, before) if own.group is not None]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 20])
def test_each_query_is_trained_on_once_in_its_order_and_as_old_as_it_may_be(max_staleness: int) -> None:
    run = Run(max_staleness)
    for step in range(STEPS):
        groups = run.step()
        assert numbers(groups) == [*range(step * SIZE, (step + 1) * SIZE)]
        assert ages(groups, step) == {min(step, max_staleness)}
        in_flight_and_handed_over = (step + 1) * SIZE + len(run.ahead)
        assert in_flight_and_handed_over == min(max_staleness + step + 1, STEPS) * SIZE
    assert run.ahead == [] and len(run.sampler.asked) == STEPS * SIZE
    assert [number for _, number in run.sampler.asked] == sorted([*range(1, STEPS + 1)] * SIZE)  # as without staleness


def test_what_takes_a_place_in_a_step_is_drawn_after_what_is_ahead() -> None:
    run = Run(1)
    run.step()
    source = run.source()
    first = taken(source)
    second = taken(source, 2, first)  # for two of them that teach nothing
    run.keep(source)
    assert numbers(first) == [3, 4, 5] and numbers(second) == [6, 7]
    assert numbers([own.group for own in run.ahead if own.group]) == [8, 9, 10]
    assert [own.query.id for own in run.ahead[SIZE:]] == ["test:11"]  # the rest of its batch waits, not sampled
    assert len(set(run.sampler.asked)) == len(run.sampler.asked)


def test_a_query_that_the_step_has_is_not_taken_again_and_is_the_first_of_the_next_step() -> None:
    run = Run(0)
    source = run.source()
    source.queries_of = lambda batch: [query_of([1], number) for number in ([0, 1, 2], [2, 3, 1], [4, 0, 5])[batch]]
    first = taken(source)
    second = taken(source, 2, first)
    assert numbers(second) == [3, 4] and numbers(taken(source, 1, first + second)) == [5]
    run.keep(source)
    run.steps += 1
    assert numbers(taken(run.source())) == [2, 1, 0]


@pytest.mark.parametrize(("num_queries", "seed"), [(12, 0), (20, 1), (40, 2), (23, 3)])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_each_query_is_sampled_once_an_epoch_whatever_is_filled_up(
    max_staleness: int, num_queries: int, seed: int
) -> None:
    """Half of the groups teach nothing. Each step is of a source that goes on from what is saved, as after a resume."""
    run, handed_over = Run(max_staleness), list[int]()
    run.sampling = run.sampling.model_copy(update={"dynamic_sampling": True})
    for run.steps in range(STEPS):
        source, step = run.source(), list[Group]()
        source.steps_left = STEPS
        source.queries_of = lambda batch: [
            query_of([1], place)
            for place in query_indices(batch, num_queries=num_queries, queries_per_step=SIZE, seed=seed, shuffle=True)
        ]
        while (missing := SIZE - sum(number % 2 for number in numbers(step))) > 0:
            new = taken(source, missing, step)
            if not new:
                break
            step += new
        assert len({*numbers(step)}) == len(step) and source.num_too_old == 0
        assert max(ages(step, run.steps)) <= max_staleness
        handed_over += numbers(step)
        run.keep(source)
    waiting = [int(own.query.id.partition(":")[2]) for own in run.ahead]
    counts = Counter(handed_over + waiting)
    assert counts.total() == run.batches_drawn * SIZE > num_queries  # none is left out
    assert max(counts.values()) - min(counts[number] for number in range(num_queries)) <= 1
    assert len(set(run.sampler.asked)) == len(run.sampler.asked)


@pytest.mark.parametrize("num_queries", [4, 14])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_no_query_comes_twice_with_the_same_random_numbers_where_rounds_take_what_is_ahead(
    max_staleness: int, num_queries: int
) -> None:
    """Also in another step, whose epoch begins with the queries that the one before has ended with."""
    run = Run(max_staleness)
    for step in range(STEPS):
        source, groups = run.source(), list[Group]()
        source.queries_of = lambda batch: [query_of([1], (batch * SIZE + place) % num_queries) for place in range(SIZE)]
        for _ in range(1 + step % 3):
            groups += taken(source, SIZE, groups)
        assert len(groups) >= SIZE
        run.keep(source)
        run.steps += 1
    assert len(set(run.sampler.asked)) == len(run.sampler.asked)


@pytest.mark.parametrize("too_old", ["drop", "refresh"])
def test_what_was_drawn_at_another_temperature_is_sampled_again_and_never_left_out(too_old: Any) -> None:
    run = Run(1, too_old)
    for step in range(3):  # as a hook sets it for each step
        run.sampling = run.sampling.model_copy(update={"temperature": 1.0 - step / 10})
        assert numbers(run.step()) == [*range(step * SIZE, (step + 1) * SIZE)]


@pytest.mark.parametrize(("too_old", "expected"), [("drop", [9, 10, 11]), ("refresh", [3, 4, 5])])
def test_what_is_too_old_after_a_resume_is_not_trained_on(too_old: Any, expected: list[int]) -> None:
    """Sampled at step 0 for steps 1 and 2; then nothing may be older than the step itself."""
    run = Run(2)
    run.step()
    run.sampling = RolloutConfig(queries_per_step=SIZE, too_old=too_old)
    source = run.source()
    groups = taken(source)
    assert numbers(groups) == expected and ages(groups, 1) == {0}
    assert source.num_too_old == 2 * SIZE


def test_a_token_that_is_too_old_is_enough_for_its_group_to_be() -> None:
    run = Run(1)
    run.step()
    run.sampler.steps = run.steps = 2
    groups = [run.sampler.made(own.query) for own in run.ahead]
    one, other, third = (replace(own, group=group) for own, group in zip(run.ahead, groups, strict=True))
    sample = groups[1].samples[0]
    mixed = Group(samples=(sample, replace(sample, versions=((1, 1), (4, 1)))))  # of step 0, and of step 2
    run.ahead = [one, replace(other, group=mixed), third]
    source = run.source()
    assert numbers(taken(source)) == [3, 5, 6] and source.num_too_old == 1


def test_what_was_in_flight_is_asked_for_again_with_the_random_numbers_it_was_drawn_with() -> None:
    run = Run(2)
    run.step()
    run.ahead = [replace(own, group=None) for own in run.ahead]
    asked = run.sampler.asked[SIZE:]
    run.sampler.asked = []
    run.step()
    assert run.sampler.asked[: 2 * SIZE] == asked


class SlowSampler(NotingSampler):
    """Lets groups end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.lost = set[str](), set[str]()  # by the query's id
        self.error: Exception | None = None

    async def group(self, query: Query, settings: Any, keys: Sequence[int], **_: Any) -> Group:
        while query.id not in self.ends:
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error
        if query.id in self.lost:
            raise LostError
        return await super().group(query, settings, keys)

    def end(self, *numbers: int) -> None:
        self.ends |= {f"test:{number}" for number in numbers}


def ahead(sampler: Any, score: Any = None, in_turn: bool = False) -> Source:
    """At the first step, with a step ahead."""
    sampling = RolloutConfig(queries_per_step=SIZE, max_staleness=1, in_turn=in_turn)
    return replace(Run(1).source(), sampler=sampler, score=score, sampling=sampling)


def test_groups_of_steps_to_come_are_sampled_meanwhile_and_handed_over_in_their_order() -> None:
    sampler = SlowSampler()
    source = ahead(sampler)
    sampler.end(2, 1, 0, 4)
    assert numbers(taken(source)) == [0, 1, 2]
    assert len(source.ahead) == SIZE  # in flight
    sampler.end(3)
    while sum(own.group is not None for own in source.snapshot()) < 2:
        pass
    assert [own.group is None for own in source.snapshot()] == [False, False, True]
    sampler.end(5)
    source.steps, source.version, source.steps_left = 1, UPDATES, 0
    assert numbers(taken(source)) == [3, 4, 5] and source.ahead == []
    assert sorted(number for _, number in sampler.asked) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("in_turn", [False, True])
def test_what_a_server_has_lost_is_asked_for_again_once_it_has_its_weights_and_nothing_else(in_turn: bool) -> None:
    sampler = SlowSampler()
    source = ahead(sampler, in_turn=in_turn)
    sampler.end(*range(2 * SIZE))
    sampler.lost = {"test:1"}
    for _ in range(2):  # as often as it is lost
        with pytest.raises(LostError):
            drawn(source)
    sampler.lost = set()
    assert numbers(taken(source)) == [0, 1, 2]
    assert sorted(sampler.asked) == sorted({*sampler.asked})  # each of them once


def test_what_a_later_step_has_lost_waits_for_a_step_to_begin() -> None:
    sampler = SlowSampler()
    source = ahead(sampler)
    sampler.end(*range(2 * SIZE))
    sampler.lost = {"test:4"}
    assert numbers(taken(source)) == [0, 1, 2]
    while source._tasks:
        pass
    assert [own.group is None for own in source.snapshot()] == [False, True, False]
    sampler.lost = set()
    source.begin_step()
    source.steps, source.version, source.steps_left = 1, UPDATES, 0
    assert numbers(taken(source)) == [3, 4, 5]
    assert sorted(sampler.asked) == [(f"test:{number}", 1 + number // SIZE) for number in range(2 * SIZE)]


def test_what_ends_the_sampling_ends_the_run() -> None:
    sampler = SlowSampler()
    sampler.error = RunError("refused")
    sampler.end(0)
    with pytest.raises(RunError, match="refused"):
        drawn(ahead(sampler))


def test_what_is_in_flight_at_the_end_is_given_up() -> None:
    sampler = SlowSampler()
    source = ahead(sampler)
    sampler.end(*range(SIZE))
    drawn(source)
    loop.run(source.close())
    sampler.end(*range(2 * SIZE))
    time.sleep(0.05)
    assert [own.group for own in source.snapshot()] == [None] * SIZE


def test_a_stop_leaves_what_is_in_flight_to_be_given_up() -> None:
    source = ahead(SlowSampler())

    def stop() -> None:
        if source._tasks:
            raise Stopped(15)

    with pytest.raises(Stopped):
        drawn(source, look=stop)
    loop.run(source.close())
    assert [own.group for own in source.snapshot()] == [None] * 2 * SIZE


class Scorer:
    """Scores once the test says so, and notes what it is given at a time."""

    def __init__(self) -> None:
        self.may, self.calls = threading.Event(), list[int]()
        self.error: Exception | None = None

    async def __call__(self, group: Group) -> Batch:
        self.calls += numbers([group])
        while not self.may.is_set():
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error
        score = Score(reward=1.0, parts={"f": 1.0})
        scored = Group(samples=tuple(replace(sample, score=score) for sample in group.samples))
        return Batch(groups=(scored,), reward_seconds={"f": 2.0}, logged={"f/n": (3.0, 1)})


def test_groups_are_scored_as_they_end_and_handed_over_with_their_scores() -> None:
    sampler, score = SlowSampler(), Scorer()
    source = ahead(sampler, score=score)
    sampler.end(*range(SIZE + 1))
    threading.Timer(0.2, score.may.set).start()
    own = drawn(source)
    assert source.seconds_for_scores > 0.1
    assert numbers([each.group for each in own if each.group]) == [0, 1, 2] and all(each.is_scored for each in own)
    while not any(each.is_scored for each in source.snapshot()):  # one of the step to come, while the trainer works
        pass
    assert sorted(score.calls) == [0, 1, 2, 3]  # each of them once
    scored = [each for each in (*own, *source.ahead) if each.is_scored]
    assert [(each.reward_seconds, each.logged) for each in scored] == [({"f": 2.0}, {"f/n": (3.0, 1)})] * 4
    loop.run(source.close())


def test_what_ends_the_scoring_ends_the_run_and_an_end_of_the_run_ends_the_scoring() -> None:
    sampler, score = SlowSampler(), Scorer()
    source = ahead(sampler, score=score)
    sampler.end(0)

    def stop() -> None:
        if score.calls:
            raise Stopped(15)

    with pytest.raises(Stopped):
        drawn(source, look=stop)
    assert [own.group is None for own in source.snapshot()[:2]] == [False, True]  # kept, though without scores
    loop.run(source.close())
    assert not any(own.is_scored for own in source.snapshot())
    score.error = UserError("no such column", where="reward")
    score.may.set()
    with pytest.raises(UserError, match="no such column"):
        drawn(ahead(sampler, score=score))


def test_what_is_waited_for_is_shown_by_its_responses() -> None:
    sampler, shown = SlowSampler(), list[tuple[int, int]]()
    source = ahead(sampler)

    def look() -> None:
        if source.ended is not None:
            shown.append(source.ended.shown()[:2])
            sampler.end(len({*shown}) - 1)  # the next one once the last is shown

    drawn(source, look=look)
    size = source.sampling.group_size
    counts = [done for done, total in dict.fromkeys(shown) if total]
    assert counts == [0, size, 2 * size, 3 * size] and shown[-1] == (3 * size, 3 * size)
    loop.run(source.close())


def test_a_group_for_which_a_function_has_failed_counts_as_not_scored() -> None:
    sample = sample_of(query_of([1]), [4])
    whole = Score(reward=1.0, parts={"f": 1.0})
    crashed, late = Failure(kind="crashed", message="f"), Failure(kind="timed_out", message="f")
    masked = replace(whole, reward=None, failure=crashed)
    measured = replace(whole, failures={"of weight 0": crashed})
    spent = replace(whole, reward=None, failure=late)  # it would take as long once more
    for score, expected in ((None, False), (masked, False), (measured, True), (spent, True), (whole, True)):
        group = Group(samples=(replace(sample, score=score),))
        assert Drawn(query=sample.query, key_step=1, group=group).is_scored == expected


def test_the_timeline_is_of_the_step() -> None:
    """The engine works until its last group ends; the trainer waits until the first three have."""
    sampler = SlowSampler()
    source = ahead(sampler)
    source.begin_step()
    sampler.end(*range(SIZE))
    drawn(source)
    time.sleep(0.1)  # the trainer is at work, and the engine, too
    both = source.timeline()
    ((start, waited),) = both.waited
    assert 0 <= start < waited <= both.seconds - 0.1
    (begun, _), (_, until) = both.sampled[0], both.sampled[-1]
    assert start <= begun < waited and until > waited + 0.1  # the last one goes on
    sampler.end(*range(2 * SIZE))
    while len([own for own in source.snapshot() if own.group]) < SIZE:
        pass
    time.sleep(0.1)
    after = source.timeline()
    assert after.waited == both.waited and after.sampled[-1][1] <= after.seconds - 0.1  # nothing is left to sample
    source.begin_step()
    assert source.timeline().waited == source.timeline().sampled == []  # what was before is of another step
    loop.run(source.close())
