"""The source of a step's groups: it draws queries, keeps them in flight, and hands groups over in their order."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby

from gspo.engine.engine import LostError
from gspo.loop import all_of
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Ended, Sampler
from gspo.types import Batch, Drawn, Group, Query, Timeline


class Spans:
    """The times in which at least one block of `open` was under way, of any thread or coroutine."""

    def __init__(self) -> None:
        self._lock, self._num_open, self._opened = threading.Lock(), 0, 0.0
        self._closed: list[tuple[float, float]] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Count the block as under way."""
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._opened = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._closed.append((self._opened, time.monotonic()))

    def since(self, start: float) -> list[tuple[float, float]]:
        """The spans from a moment on until now, in seconds after it; what was over before is forgotten."""
        with self._lock:
            self._closed = [span for span in self._closed if span[1] > start]
            spans = [*self._closed, *([(self._opened, time.monotonic())] if self._num_open else [])]
        return [(max(0.0, opened - start), closed - start) for opened, closed in spans]


@dataclass(kw_only=True)
class Source:
    """The queries that are drawn and not handed over yet: the event loop has them sampled and scored.

    What is in flight and what was handed over are never more than the groups of `max_staleness` steps and of the one
    under way. They are handed over in the order in which they were drawn: no length is preferred, and none of them can
    get older than `max_staleness` steps, unless a resume has lowered that. What is left of a batch of the order waits
    for the next draw, and so does a query that the step has already: each comes once an epoch.
    """

    sampler: Sampler
    seed: int
    updates_per_step: int
    queries_of: Callable[[int], Sequence[Query]]  # the batch of this number in the order of the queries
    # Scores a group that ends while the policy is trained; None: it gets no scores.
    score: Callable[[Group], Awaitable[Batch]] | None = None
    # Where batches are drawn, and have queries of those before: of how many different ones. None: they have an order.
    num_drawn_from: int | None = None
    batches_drawn: int = 0
    num_taken: dict[str, int] = field(default_factory=dict)  # queries of each of several sources, by `queries_of`
    ahead: list[Drawn] = field(default_factory=list)
    record_experts: bool = False
    # Of the step under way:
    sampling: RolloutConfig
    steps: int = 0  # that are finished
    version: int = 0  # of the policy: the updates that were made or skipped
    steps_left: int = 0  # after it
    handed_over: list[Drawn] = field(default_factory=list)  # in the step that is being collected
    num_too_old: int = 0
    ended: Ended | None = None  # responses of those that are waited for
    seconds_for_scores: float = 0.0  # that the last hand-over waited for nothing else
    waiting: Spans = field(default_factory=Spans)  # of the trainer, which does nothing else meanwhile
    _started: float = 0.0
    _sampling: Spans = field(default_factory=Spans)
    _tasks: dict[Drawn, asyncio.Task[None]] = field(default_factory=dict)  # what is in flight
    _lost: set[Drawn] = field(default_factory=set)  # what a server has failed to sample
    _failure: Exception | None = None  # the run cannot go on
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def next_groups(self, number: int, taken: Sequence[Group]) -> list[Drawn]:
        """Hand over so many with their groups, or fewer where the order has none beside those `taken` in this step.

        Weights must have been published for the step.
        LostError where a server has failed that the step needs: once it has its weights again, this can be called anew.
        A group that was sampled while the policy was trained has its scores, where that is told to score.
        """
        with self.waiting.open():
            number = await self._have_ended(number, {group.query.id for group in taken})
        taken_now = self.ahead[:number]
        del self.ahead[:number]
        self.handed_over += taken_now
        return taken_now

    def begin_step(self) -> None:
        """Begin a step, before weights are published for it: a server that has failed can then be asked again."""
        self.handed_over, self.num_too_old, self._started = [], 0, time.monotonic()
        self._lost.clear()
        self.timeline()  # forgets what was over before

    def timeline(self) -> Timeline:
        """The timeline of the step under way, until now."""
        waited, sampled = self.waiting.since(self._started), self._sampling.since(self._started)
        return Timeline(seconds=time.monotonic() - self._started, waited=waited, sampled=sampled)

    def snapshot(self) -> tuple[Drawn, ...]:
        """Return what is ahead now: with groups what is sampled, and without what is in flight or waits to be."""
        return tuple(self.ahead)

    async def close(self) -> None:
        """Give up what is in flight; a second call does nothing."""
        tasks = {*self._tasks.values()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _have_ended(self, number: int, taken: Set[str]) -> int:
        """Draw and sample until the first so many have their groups; how many: fewer where the order has no others."""
        self._leave_out_old()
        number = self._draw(number, taken)
        self.seconds_for_scores = 0.0
        self.ended = Ended(self.sampler.engine)
        while True:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            self.ended.total = number * self.sampling.group_size
            await self._start(number)
            needed = self.ahead[:number]
            self.ended.num = sum(map(self._has_ended, needed)) * self.sampling.group_size
            if self.ended.num == self.ended.total:
                return number
            began, is_for_scores = time.monotonic(), all(drawn.group is not None for drawn in needed)
            await self._changed.wait()
            self.seconds_for_scores += is_for_scores * (time.monotonic() - began)
            if self._leave_out_old():
                number = self._draw(number, taken)

    def _has_ended(self, drawn: Drawn) -> bool:
        return drawn.group is not None and drawn not in self._tasks

    def _draw(self, number: int, taken: Set[str]) -> int:
        """Draw whole batches of the order until so many can be handed over and nothing more may be in flight.

        How many can be: fewer where the step has all queries already.
        """
        while (num_ready := self._put_first(number, taken)) < number or len(self.ahead) < self._most_ahead(number):
            others = [drawn.query.id for drawn in self.ahead[num_ready:]]
            known = {*taken, *(drawn.query.id for drawn in self.ahead)} if self.num_drawn_from is not None else set()
            if self.num_drawn_from is not None and len(known) >= self.num_drawn_from:
                break
            if not known and num_ready < number and len({*others}) < len(others):  # an epoch lies between two of them
                break
            key_step, temperature = 1 + self.batches_drawn, self.sampling.temperature
            queries = [query for query in self.queries_of(self.batches_drawn) if query.id not in known]
            self.ahead += [Drawn(query=query, key_step=key_step, temperature=temperature) for query in queries]
            self.batches_drawn += 1
        return num_ready

    def _put_first(self, number: int, taken: Set[str]) -> int:
        """Move the first so many different queries that the step has not yet to the front; how many there are."""
        first, others = dict[str, Drawn](), list[Drawn]()
        for drawn in self.ahead:
            if len(first) == number or drawn.query.id in taken or drawn.query.id in first:
                others.append(drawn)
            else:
                first[drawn.query.id] = drawn
        self.ahead = [*first.values(), *others]
        return len(first)

    def _most_ahead(self, number: int) -> int:
        """The most that may be ahead while so many are taken; a resume may have lowered it."""
        return max(0, min(self.sampling.max_staleness, self.steps_left)) * self.sampling.queries_per_step + number

    async def _start(self, number: int) -> None:
        """Have sampled what is neither sampled nor in flight; in turn with the updates, wait for it.

        What a server has lost is LostError where the step needs it, and else waits for the next step to begin.
        """
        needed = self.ahead[:number]
        if not self._lost.isdisjoint(needed):
            self._lost.clear()
            raise LostError
        missing, before = list[Drawn](), set[str]()
        for place, drawn in enumerate(self.ahead[: self._most_ahead(number)]):
            # Where steps take as many as they need, two of a query may come to lie in one. The second has to wait for
            # the next step, and would be too old there.
            is_second = self.sampling.dynamic_sampling and drawn.query.id in before
            before.add(drawn.query.id)
            if drawn.group is not None or drawn in self._tasks or drawn in self._lost or is_second:
                continue
            # Without staleness a step's random numbers are its own. The temperature may be of before a resume.
            key_step = drawn.key_step if self.sampling.max_staleness else self.steps + 1
            if (drawn.key_step, drawn.temperature) != (key_step, self.sampling.temperature):
                drawn = replace(drawn, key_step=key_step, temperature=self.sampling.temperature)
                self.ahead[place] = drawn
            missing.append(drawn)
        for key_step, part in groupby(missing, key=lambda each: each.key_step):
            batch, key = [*part], SamplingKey(seed=self.seed, step=key_step)
            keys = key.of_groups([each.query.id for each in batch], self.sampling.group_size)
            if self.sampling.max_staleness and not self.sampling.in_turn:
                for drawn, own in zip(batch, keys, strict=True):
                    self._tasks[drawn] = asyncio.create_task(self._make(drawn, own))
                continue
            # All at once: what is asked for again after a stop has the same company, to the last bit.
            groups = await all_of(
                [self._sample(drawn, own, self.ended) for drawn, own in zip(batch, keys, strict=True)]
            )
            for drawn, group in zip(batch, groups, strict=True):
                self._replace(drawn, replace(drawn, group=group))
            if None in groups:
                raise LostError

    async def _sample(self, drawn: Drawn, keys: Sequence[int], ended: Ended | None = None) -> Group | None:
        """A group; None where a server has failed."""
        experts = self.record_experts
        with self._sampling.open(), suppress(LostError):
            return await self.sampler.group(drawn.query, self.sampling, keys, record_experts=experts, ended=ended)
        return None

    async def _make(self, drawn: Drawn, keys: Sequence[int]) -> None:
        """Sample a group and have it scored, while the policy is trained."""
        try:
            drawn = self._replace(drawn, replace(drawn, group=await self._sample(drawn, keys)))
            if drawn.group is None:
                self._lost.add(drawn)
            elif self.score is not None:
                batch = await self.score(drawn.group)
                scored = replace(drawn, group=batch.groups[0], reward_seconds=batch.reward_seconds, logged=batch.logged)
                drawn = self._replace(drawn, scored)
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._tasks.pop(drawn, None)
            self._changed.set()

    def _replace(self, drawn: Drawn, by: Drawn) -> Drawn:
        """Put what has become of it into its place; what is in flight stays so."""
        self.ahead = [by if each is drawn else each for each in self.ahead]
        if drawn in self._tasks:
            self._tasks[by] = self._tasks.pop(drawn)
        self._changed.set()
        return by

    def _leave_out_old(self) -> bool:
        """Groups of which any token is older than `max_staleness` steps, or that were drawn as is no longer wanted.

        That is at another temperature, or longer than a response may be now. Their queries are sampled again or, of
        what is too old, left out (`too_old: drop`). Whether there were any.
        """
        kept: list[Drawn] = []
        for drawn in self.ahead:
            is_old = drawn.group is not None and self._age(drawn.group) > self.sampling.max_staleness
            if drawn.group is None or not (is_old or self._is_other(drawn, drawn.group)):
                kept.append(drawn)
                continue
            self.num_too_old += 1
            if not is_old or self.sampling.too_old == "refresh":
                kept.append(
                    replace(drawn, group=None, reward_seconds={}, logged={}, temperature=self.sampling.temperature)
                )
        has_changed, self.ahead = self.ahead != kept, kept
        return has_changed

    def _is_other(self, drawn: Drawn, group: Group) -> bool:
        longest = max(sample.num_limited for sample in group.samples)
        return drawn.temperature != self.sampling.temperature or longest > self.sampling.max_new_tokens

    def _age(self, group: Group) -> int:
        """The age of its oldest token, in steps."""
        oldest = min(version for sample in group.samples for version, _ in sample.versions)
        return -(-(self.version - oldest) // self.updates_per_step)
