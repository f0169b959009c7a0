"""The source of a step's groups: it draws queries, keeps them in flight, and hands groups over in their order."""

import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from gspo.recipe.sections import RolloutConfig
from gspo.rollout.engine import Engine, SamplingKey
from gspo.types import Drawn, Group, Query, ShowProgress

_LOOK_SECONDS = 0.02  # between two looks at what has been sampled


@runtime_checkable
class BesideEngine(Engine, Protocol):
    """An engine that samples while the policy is trained."""

    def sample_beside(
        self,
        queries: Sequence[Query],
        settings: RolloutConfig,
        key: SamplingKey,
        found: dict[int, Group],
        *,
        record_experts: bool,
        check_stop: Callable[[], None],
    ) -> None:
        """Called by another thread than the trainer's: put each query's group by its place into `found` as it ends.

        What cannot be sampled, since a server has failed, is left out.
        """
        ...


class _ClosedError(Exception):
    """The run ends, and what is in flight is given up."""


@dataclass(kw_only=True)
class _Flight:
    """Queries that a thread has sampled."""

    drawn: Sequence[Drawn]
    thread: threading.Thread
    found: dict[int, Group] = field(default_factory=dict)  # by their places
    failure: BaseException | None = None


@dataclass(kw_only=True)
class Source:
    """What is drawn and not handed over yet, and whoever samples it.

    What is in flight and what was handed over are never more than the groups of `max_staleness` steps and of the one
    under way. They are handed over in the order in which they were drawn: no length is preferred, and none of them can
    get older than `max_staleness` steps, unless a resume has lowered that.
    """

    engine: Engine
    seed: int
    updates_per_step: int
    queries_of: Callable[[int], Sequence[Query]]  # the batch of this number in the order of the queries
    batches_drawn: int = 0
    ahead: list[Drawn] = field(default_factory=list)
    record_experts: bool = False
    # Of the step under way:
    sampling: RolloutConfig
    steps: int = 0  # that are finished
    version: int = 0  # of the policy: the updates that were made or skipped
    steps_left: int = 0  # after it
    num_too_old: int = 0
    _flights: list[_Flight] = field(default_factory=list)
    _failed: set[Drawn] = field(default_factory=set)  # what a thread has tried in vain
    _failure: BaseException | None = None  # of a thread: the run cannot go on
    _is_closed: bool = False

    def take(
        self,
        number: int,
        taken: Sequence[Group],
        *,
        check_stop: Callable[[], None] = lambda: None,
        show_progress: ShowProgress = lambda *_: None,
    ) -> list[Group]:
        """Hand over so many groups, or fewer where the order has none beside those `taken` before in this step.

        Weights must have been published for the step. The callables are those of Engine.sample.
        """
        watched: dict[str, Any] = {"check_stop": check_stop, "show_progress": show_progress}
        ids = {group.query.id for group in taken}
        self._land()
        self._raise_failure()
        self._leave_out_old()
        self._draw(number, ids)
        self._sample(watched)
        while (ended := sum(drawn.group is not None for drawn in self.ahead[:number])) < len(self.ahead[:number]):
            check_stop()
            show_progress(ended * self.sampling.group_size, number * self.sampling.group_size, "responses")
            time.sleep(_LOOK_SECONDS)
            self._land()
            self._raise_failure()
            if self._leave_out_old():
                self._draw(number, ids)
            self._sample(watched)
        found = [drawn.group for drawn in self.ahead[:number] if drawn.group is not None]
        del self.ahead[:number]
        return found

    def snapshot(self) -> tuple[Drawn, ...]:
        """What is ahead now: with groups what is sampled, and without what is in flight."""
        self._land()
        return tuple(self.ahead)

    def close(self) -> None:
        """Give up what is in flight; a second call does nothing."""
        self._is_closed = True
        for flight in self._flights:
            flight.thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _draw(self, number: int, taken: Set[str]) -> None:
        """Draw whole batches of the order until nothing more may be in flight; of the last one as much as may be."""
        size = self.sampling.queries_per_step
        steps_ahead = max(0, min(self.sampling.max_staleness, self.steps_left))
        room = steps_ahead * size + number - len(self.ahead)
        while room > 0:
            key_step = self.steps + 1 + len(self.ahead) // size
            # A query comes once with the random numbers of a step.
            others = {own.query.id for own in self.ahead if own.key_step == key_step}
            others |= taken if key_step == self.steps + 1 else set()
            queries = [query for query in self.queries_of(self.batches_drawn) if query.id not in others][:room]
            temperature = self.sampling.temperature
            self.ahead += [Drawn(query=query, key_step=key_step, temperature=temperature) for query in queries]
            self.batches_drawn += 1
            room -= size

    def _sample(self, watched: dict[str, Any]) -> None:
        """Have sampled what is neither sampled nor in flight: by a thread, or in turn with the updates.

        What a thread has tried is sampled here, where a server that has failed can be given the weights of now.
        """
        in_flight = {id(drawn) for flight in self._flights for drawn in flight.drawn}
        missing = list[Drawn]()
        for place, own in enumerate(self.ahead):
            if own.group is None and id(own) not in in_flight:
                if own.temperature != self.sampling.temperature:  # of before a resume
                    own = self.ahead[place] = replace(own, temperature=self.sampling.temperature)
                missing.append(own)
        for key_step, part in groupby(missing, key=lambda drawn: drawn.key_step):
            drawn, key = [*part], SamplingKey(seed=self.seed, step=key_step)
            if self.sampling.max_staleness and not self.sampling.in_turn and self._failed.isdisjoint(drawn):
                self._fly(drawn, key)
                continue
            queries = [own.query for own in drawn]
            groups = self.engine.sample(queries, self.sampling, key, record_experts=self.record_experts, **watched)
            self._put(drawn, dict(enumerate(groups)))
            self._failed.difference_update(drawn)

    def _fly(self, drawn: Sequence[Drawn], key: SamplingKey) -> None:
        """Start a thread that has these sampled."""
        engine, settings = self.engine, self.sampling
        assert isinstance(engine, BesideEngine)
        queries = [own.query for own in drawn]

        def check_stop() -> None:
            if self._is_closed:
                raise _ClosedError

        def sample() -> None:
            try:
                with suppress(_ClosedError):
                    options: dict[str, Any] = {"record_experts": self.record_experts, "check_stop": check_stop}
                    engine.sample_beside(queries, settings, key, flight.found, **options)
            except BaseException as error:
                flight.failure = error

        flight = _Flight(drawn=drawn, thread=threading.Thread(target=sample, name="sampling", daemon=True))
        self._flights.append(flight)
        flight.thread.start()

    def _land(self) -> None:
        """Put what threads have sampled into its places."""
        for flight in [*self._flights]:
            is_over = not flight.thread.is_alive()  # before its groups are looked at
            self._put(flight.drawn, dict(flight.found))
            if is_over:
                self._flights.remove(flight)
                self._failure = self._failure or flight.failure
                self._failed |= {own for place, own in enumerate(flight.drawn) if place not in flight.found}

    def _put(self, drawn: Sequence[Drawn], found: dict[int, Group]) -> None:
        groups = {id(drawn[place]): group for place, group in found.items()}
        self.ahead = [replace(own, group=groups[id(own)]) if id(own) in groups else own for own in self.ahead]

    def _leave_out_old(self) -> bool:
        """Groups of which any token is older than `max_staleness` steps, or was drawn at another temperature.

        Their queries are sampled again (`too_old: refresh`), or not. Whether there were any.
        """
        kept: list[Drawn] = []
        for drawn in self.ahead:
            is_of_now = drawn.temperature == self.sampling.temperature
            if drawn.group is None or (is_of_now and self._age(drawn.group) <= self.sampling.max_staleness):
                kept.append(drawn)
                continue
            self.num_too_old += 1
            if self.sampling.too_old == "refresh":
                kept.append(replace(drawn, group=None, temperature=self.sampling.temperature))
        has_changed, self.ahead = self.ahead != kept, kept
        return has_changed

    def _age(self, group: Group) -> int:
        """In steps, of its oldest token."""
        oldest = min(version for sample in group.samples for version, _ in sample.versions)
        return -(-(self.version - oldest) // self.updates_per_step)
