"""What the source keeps in flight, in which order it hands it over, and what becomes of what is too old."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.samples import query_of, sample_of

from gspo.errors import RunError, Stopped, UserError
from gspo.queries.order import query_indices
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.engine import SamplingKey
from gspo.rollout.source import Source
from gspo.types import Batch, Drawn, Failure, Group, Query, Score

SIZE, UPDATES = 3, 2  # queries a step, and updates
STEPS = 9


class Sampler:
    """Samples with the weights of a number of steps, and notes which queries with which random numbers."""

    def __init__(self) -> None:
        self.steps = 0
        self.asked: list[tuple[str, int]] = []

    def sample(self, queries: Sequence[Query], _: Any, key: SamplingKey, **__: Any) -> tuple[Group, ...]:
        self.asked += [(query.id, key.step) for query in queries]
        version = self.steps * UPDATES
        samples = [replace(sample_of(query, [4, 5]), versions=((version, 1), (version, 1))) for query in queries]
        return tuple(Group(samples=(sample, sample)) for sample in samples)


class Run:
    """Steps that take all their groups from a source; queries are numbered in their order."""

    def __init__(self, max_staleness: int, too_old: Any = "drop") -> None:
        self.sampler, self.batches_drawn, self.steps = Sampler(), 0, 0
        self.ahead: list[Drawn] = []
        self.sampling = RolloutConfig(queries_per_step=SIZE, max_staleness=max_staleness, too_old=too_old, in_turn=True)

    def source(self) -> Source:
        self.sampler.steps = self.steps
        return Source(
            engine=Mock(sample=self.sampler.sample),
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


def taken(source: Source, number: int = SIZE, before: Sequence[Group] = (), **watched: Any) -> list[Group]:
    return [own.group for own in source.take(number, before, **watched) if own.group is not None]


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
    groups = run.sampler.sample([own.query for own in run.ahead], None, SamplingKey(seed=0, step=2))
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


class Beside:
    """An engine that lets groups end when the test says so."""

    def __init__(self) -> None:
        self.ends: dict[str, threading.Event] = defaultdict(threading.Event)  # by the query's id
        self.sampler, self.fails = Sampler(), set[str]()
        self.sample = self.sampler.sample
        self.error: Exception | None = None

    def sample_beside(
        self,
        queries: Sequence[Query],
        settings: Any,
        key: SamplingKey,
        put: Callable[[int, Group], None],
        **options: Any,
    ) -> None:
        for place, query in enumerate(queries):
            while not self.ends[query.id].wait(0.001):
                options["check_stop"]()
            if self.error is not None:
                raise self.error
            if query.id not in self.fails:
                put(place, *self.sampler.sample([query], settings, key))

    publish = describe = take_metrics = close = Mock()


def beside(engine: Any, score: Any = None) -> Source:
    """At the first step, with a step ahead."""
    sampling = RolloutConfig(queries_per_step=SIZE, max_staleness=1)
    return replace(Run(1).source(), engine=engine, score=score, sampling=sampling)


def test_groups_of_steps_to_come_are_sampled_beside_and_handed_over_in_their_order() -> None:
    engine = Beside()
    source = beside(engine)
    for number in (2, 1, 0, 4):
        engine.ends[f"test:{number}"].set()
    assert numbers(taken(source)) == [0, 1, 2]
    assert len(source.ahead) == SIZE  # in flight
    engine.ends["test:3"].set()
    while sum(own.group is not None for own in source.snapshot()) < 2:
        pass
    assert [own.group is None for own in source.snapshot()] == [False, False, True]
    engine.ends["test:5"].set()
    source.steps, source.version, source.steps_left = 1, UPDATES, 0
    assert numbers(taken(source)) == [3, 4, 5] and source.ahead == []
    assert sorted(number for _, number in engine.sampler.asked) == [1, 1, 1, 2, 2, 2]


def test_what_a_thread_has_tried_in_vain_is_sampled_where_a_server_can_be_looked_after() -> None:
    engine = Beside()
    source = beside(engine)
    for number in range(2 * SIZE):
        engine.ends[f"test:{number}"].set()
    engine.fails = {"test:1"}
    assert numbers(taken(source)) == [0, 1, 2]
    assert sorted(engine.sampler.asked) == sorted({*engine.sampler.asked})  # each of them once


def test_what_ends_a_thread_ends_the_run() -> None:
    engine = Beside()
    engine.error = RunError("refused")
    engine.ends["test:0"].set()
    with pytest.raises(RunError, match="refused"):
        beside(engine).take(SIZE, [])


def test_what_is_in_flight_at_the_end_is_given_up() -> None:
    engine, threads = Beside(), threading.active_count()
    source = beside(engine)
    for number in range(SIZE):
        engine.ends[f"test:{number}"].set()
    source.take(SIZE, [])
    source.close()
    assert threading.active_count() == threads and [own.group for own in source.snapshot()] == [None] * SIZE


def test_a_stop_leaves_what_is_in_flight_to_be_given_up() -> None:
    source = beside(Beside())
    with pytest.raises(Stopped):
        source.take(SIZE, [], check_stop=Mock(side_effect=Stopped(15)))
    source.close()
    assert [own.group for own in source.snapshot()] == [None] * 2 * SIZE


class Scorer:
    """Scores once the test says so, and notes what it is given at a time."""

    def __init__(self) -> None:
        self.may, self.calls = threading.Event(), list[list[int]]()
        self.error: Exception | None = None

    def __call__(
        self,
        groups: Sequence[Group],
        *,
        more: Callable[[], Sequence[Group]],
        put: Callable[[Group, Batch], object],
        check_stop: Callable[[], None],
    ) -> None:
        self.calls.append(numbers(groups))
        while not self.may.wait(0.001):
            check_stop()
        if self.error is not None:
            raise self.error
        score = Score(reward=1.0, parts={"f": 1.0})
        for group in groups:
            scored = Group(samples=tuple(replace(sample, score=score) for sample in group.samples))
            put(group, Batch(groups=(scored,), reward_seconds={"f": 2.0}, logged={"f/n": (3.0, 1)}))


def test_groups_are_scored_as_they_end_and_handed_over_with_their_scores() -> None:
    engine, score = Beside(), Scorer()
    source = beside(engine, score=score)
    for number in range(SIZE + 1):
        engine.ends[f"test:{number}"].set()
    threading.Timer(0.2, score.may.set).start()
    drawn = source.take(SIZE, [])
    assert source.seconds_for_scores > 0.1
    assert numbers([own.group for own in drawn if own.group]) == [0, 1, 2] and all(own.is_scored for own in drawn)
    while not any(own.is_scored for own in source.snapshot()):  # one of the step to come, while the trainer is at work
        pass
    assert sorted(number for call in score.calls for number in call) == [0, 1, 2, 3]  # each of them once
    scored = [own for own in (*drawn, *source.ahead) if own.is_scored]
    assert [(own.reward_seconds, own.logged) for own in scored] == [({"f": 2.0}, {"f/n": (3.0, 1)})] * 4
    source.close()


def test_what_ends_the_scoring_ends_the_run_and_an_end_of_the_run_ends_the_scoring() -> None:
    engine, score = Beside(), Scorer()
    source = beside(engine, score=score)
    engine.ends["test:0"].set()
    with pytest.raises(Stopped):
        source.take(SIZE, [], check_stop=Mock(side_effect=Stopped(15)))
    while not score.calls:
        pass
    assert [own.group is None for own in source.snapshot()[:2]] == [False, True]  # kept, though without scores
    source.close()
    assert not any(own.is_scored for own in source.snapshot())
    score.error = UserError("no such column", where="reward")
    score.may.set()
    with pytest.raises(UserError, match="no such column"):
        again = beside(engine, score=score)
        again.take(SIZE, [])


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
    engine = Beside()
    source = beside(engine)
    source.begin_step()
    for number in range(SIZE):
        engine.ends[f"test:{number}"].set()
    source.take(SIZE, [])
    time.sleep(0.1)  # the trainer is at work, and the engine, too
    both = source.timeline()
    ((start, waited),) = both.waited
    assert 0 <= start < waited <= both.seconds - 0.1
    (begun, _), (_, until) = both.sampled[0], both.sampled[-1]
    assert start <= begun < waited and until > waited + 0.1  # the last one goes on
    for number in range(SIZE, 2 * SIZE):
        engine.ends[f"test:{number}"].set()
    while len([own for own in source.snapshot() if own.group]) < SIZE or source._beside.sampling._num_open:
        pass
    time.sleep(0.1)
    after = source.timeline()
    assert after.waited == both.waited and after.sampled[-1][1] <= after.seconds - 0.1  # nothing is left to sample
    source.begin_step()
    assert source.timeline().waited == source.timeline().sampled == []  # what was before is of another step
    source.close()
