"""Sampling and scoring beside the training: threads that ask an engine for groups, and one that has them scored."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

from gspo.recipe.sections import RolloutConfig
from gspo.rollout.engine import Engine, SamplingKey
from gspo.types import Batch, Drawn, Group, Query


@runtime_checkable
class BesideEngine(Engine, Protocol):
    """An engine that samples while the policy is trained."""

    def sample_beside(
        self,
        queries: Sequence[Query],
        settings: RolloutConfig,
        key: SamplingKey,
        put: Callable[[int, Group], None],
        *,
        record_experts: bool,
        check_stop: Callable[[], None],
    ) -> None:
        """Called by another thread than the trainer's: hand over each query's place and group as the group ends.

        What cannot be sampled, since a server has failed, is left out.
        """
        ...


# Scores groups, and those that its `more` returns meanwhile: its `put` gets each with its batch as it is scored.
# Its `check_stop` is called again and again, and may raise.
ScoreGroups = Callable[..., object]


class _ClosedError(Exception):
    """The run ends, and what is under way is given up."""


class Spans:
    """The times in which at least one thread was in a block of `open`."""

    def __init__(self) -> None:
        self._lock, self._num_open, self._opened = threading.Lock(), 0, 0.0
        self._closed: list[tuple[float, float]] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """The calling thread is, within the block."""
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
        """From a moment on until now, in seconds after it; what was over before is forgotten."""
        with self._lock:
            self._closed = [span for span in self._closed if span[1] > start]
            spans = [*self._closed, *([(self._opened, time.monotonic())] if self._num_open else [])]
        return [(max(0.0, opened - start), closed - start) for opened, closed in spans]


@dataclass(kw_only=True)
class Beside:
    """The threads of a run, and what has come of them since it was taken last.

    A thread changes nothing of what it was given: it says what became of it.
    """

    engine: Engine
    score: ScoreGroups | None = None  # None: groups are handed over as they are
    sampling: Spans = field(default_factory=Spans)
    failed: set[Drawn] = field(default_factory=set)  # what was tried in vain
    _under_way: set[Drawn] = field(default_factory=set)
    _changes: SimpleQueue[tuple[Drawn, Drawn]] = field(default_factory=SimpleQueue)
    _to_score: SimpleQueue[Drawn | None] = field(default_factory=SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _scorer: threading.Thread | None = None
    _failure: BaseException | None = None  # the run cannot go on
    _is_closed: bool = False

    def is_under_way(self, drawn: Drawn) -> bool:
        """Whether it is being sampled or scored."""
        return drawn in self._under_way

    def take_changes(self) -> Iterator[tuple[Drawn, Drawn]]:
        """What was drawn, and what became of it: with a group, or with one that has scores."""
        while not self._changes.empty():
            yield self._changes.get()

    def raise_failure(self) -> None:
        """Raise what has ended a thread."""
        if self._failure is not None:
            raise self._failure

    def start(self, drawn: Sequence[Drawn], settings: RolloutConfig, key: SamplingKey, *, record_experts: bool) -> None:
        """Start a thread that has these sampled."""
        engine = self.engine
        assert isinstance(engine, BesideEngine)
        options: dict[str, Any] = {"record_experts": record_experts, "check_stop": self._check_stop}

        def put(place: int, group: Group) -> None:
            self._put(drawn[place], replace(drawn[place], group=group))
            self._under_way.discard(drawn[place])

        def sample() -> None:
            try:
                with suppress(_ClosedError), self.sampling.open():
                    engine.sample_beside([each.query for each in drawn], settings, key, put, **options)
            except BaseException as error:
                self._failure = self._failure or error
            self.failed.update(left := self._under_way.intersection(drawn))
            self._under_way.difference_update(left)

        if self.score is not None and self._scorer is None:
            self._scorer = threading.Thread(target=self._score, name="scoring", daemon=True)
            self._scorer.start()
        self._under_way.update(drawn)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=sample, name="sampling", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Give up what is under way; a second call does nothing."""
        self._is_closed = True
        self._to_score.put(None)
        for thread in [*self._threads, *filter(None, (self._scorer,))]:
            thread.join()

    def _check_stop(self) -> None:
        if self._is_closed:
            raise _ClosedError

    def _put(self, was: Drawn, sampled: Drawn) -> None:
        if self.score is not None:
            self._under_way.add(sampled)
        self._changes.put((was, sampled))
        if self.score is not None:
            self._to_score.put(sampled)

    def _score(self) -> None:
        """Have groups scored as they come: functions make many calls at a time."""
        scoring: dict[Group, Drawn] = {}

        def take(drawn: Drawn | None) -> list[Group]:
            if drawn is None or drawn.group is None:
                return []
            scoring[drawn.group] = drawn
            return [drawn.group]

        def more() -> list[Group]:
            groups: list[Group] = []
            while not self._to_score.empty():
                groups += take(self._to_score.get())
            return groups

        def put(group: Group, batch: Batch) -> None:
            drawn = scoring.pop(group)
            cost: dict[str, Any] = {"reward_seconds": batch.reward_seconds, "logged": batch.logged}
            self._changes.put((drawn, replace(drawn, group=batch.groups[0], **cost)))
            self._under_way.discard(drawn)

        assert self.score is not None
        try:
            while not self._is_closed and (groups := take(self._to_score.get())):
                self.score(groups, more=more, put=put, check_stop=self._check_stop)
        except _ClosedError:
            pass
        except BaseException as error:
            self._failure = self._failure or error
