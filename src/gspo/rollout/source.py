"""The source of a step's groups: it draws queries, keeps them in flight, and hands groups over in their order."""

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from gspo.recipe.sections import RolloutConfig
from gspo.rollout.beside import Beside, ScoreGroups, Spans
from gspo.rollout.engine import Engine, SamplingKey
from gspo.types import Drawn, Group, Query, ShowProgress, Timeline

_LOOK_SECONDS = 0.02  # between two looks at what has been sampled


@dataclass(kw_only=True)
class Source:
    """What is drawn and not handed over yet, and whoever samples it.

    What is in flight and what was handed over are never more than the groups of `max_staleness` steps and of the one
    under way. They are handed over in the order in which they were drawn: no length is preferred, and none of them can
    get older than `max_staleness` steps, unless a resume has lowered that. What is left of a batch of the order waits
    for the next draw, and so does a query that the step has already: each comes once an epoch.
    """

    engine: Engine
    seed: int
    updates_per_step: int
    queries_of: Callable[[int], Sequence[Query]]  # the batch of this number in the order of the queries
    score: ScoreGroups | None = None  # scores groups that end beside the training; None: they get no scores
    batches_drawn: int = 0
    ahead: list[Drawn] = field(default_factory=list)
    record_experts: bool = False
    # Of the step under way:
    sampling: RolloutConfig
    steps: int = 0  # that are finished
    version: int = 0  # of the policy: the updates that were made or skipped
    steps_left: int = 0  # after it
    handed_over: list[Drawn] = field(default_factory=list)  # in the step that is being collected
    num_too_old: int = 0
    seconds_for_scores: float = 0.0  # that the last hand-over waited for nothing else
    waiting: Spans = field(default_factory=Spans)  # of the trainer, which does nothing else meanwhile
    _started: float = 0.0

    def __post_init__(self) -> None:
        self._beside = Beside(engine=self.engine, score=self.score)

    def take(
        self,
        number: int,
        taken: Sequence[Group],
        *,
        check_stop: Callable[[], None] = lambda: None,
        show_progress: ShowProgress = lambda *_: None,
    ) -> list[Drawn]:
        """Hand over so many with their groups, or fewer where the order has none beside those `taken` in this step.

        Weights must have been published for the step. The callables are those of Engine.sample. A group that was
        sampled beside the training has its scores, where that is told to score.
        """
        watched: dict[str, Any] = {"check_stop": check_stop, "show_progress": show_progress}
        with self.waiting.open():
            number = self._have_ended(number, {group.query.id for group in taken}, watched)
        self._follow()  # what is not under way any more may have scores by now
        taken_now = self.ahead[:number]
        del self.ahead[:number]
        self.handed_over += taken_now
        return taken_now

    def begin_step(self) -> None:
        """Called before weights are published for a step: then a server that has failed can be asked again."""
        self.handed_over, self.num_too_old, self._started = [], 0, time.monotonic()
        self._beside.failed.clear()
        self.timeline()  # forgets what was over before

    def timeline(self) -> Timeline:
        """Of the step under way, until now."""
        waited, sampled = self.waiting.since(self._started), self._beside.sampling.since(self._started)
        return Timeline(seconds=time.monotonic() - self._started, waited=waited, sampled=sampled)

    def snapshot(self) -> tuple[Drawn, ...]:
        """What is ahead now: with groups what is sampled, and without what is in flight or waits to be."""
        self._follow()
        return tuple(self.ahead)

    def close(self) -> None:
        """Give up what is in flight; a second call does nothing."""
        self._beside.close()

    def _have_ended(self, number: int, taken: Set[str], watched: dict[str, Any]) -> int:
        """Draw and sample until the first so many have their groups; how many: fewer where the order has no others."""
        self._land()
        self._leave_out_old()
        number = self._draw(number, taken)
        self._sample(number, watched)
        self.seconds_for_scores = 0.0
        while (ended := sum(map(self._has_ended, self.ahead[:number]))) < len(self.ahead[:number]):
            watched["check_stop"]()
            size = self.sampling.group_size
            watched["show_progress"](ended * size, number * size, "responses")
            time.sleep(_LOOK_SECONDS)
            self.seconds_for_scores += _LOOK_SECONDS * all(drawn.group is not None for drawn in self.ahead[:number])
            self._land()
            if self._leave_out_old():
                number = self._draw(number, taken)
            self._sample(number, watched)
        return number

    def _has_ended(self, drawn: Drawn) -> bool:
        return drawn.group is not None and not self._beside.is_under_way(drawn)

    def _draw(self, number: int, taken: Set[str]) -> int:
        """Draw whole batches of the order until so many can be handed over and nothing more may be in flight.

        How many can be: fewer where the step has all queries already.
        """
        while (num_ready := self._put_first(number, taken)) < number or len(self.ahead) < self._most_ahead(number):
            others = [drawn.query.id for drawn in self.ahead[num_ready:]]
            if num_ready < number and len({*others}) < len(others):  # an epoch lies between two that it cannot take
                break
            key_step, temperature = 1 + self.batches_drawn, self.sampling.temperature
            queries = self.queries_of(self.batches_drawn)
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

    def _sample(self, number: int, watched: dict[str, Any]) -> None:
        """Have sampled what is neither sampled nor in flight: by a thread, or in turn with the updates.

        What a thread has tried in vain is sampled here, where a server that has failed can be given the weights of
        now, if this step needs it; what no step needs yet is tried again when the next one begins.
        """
        missing, most, before = list[Drawn](), self._most_ahead(number), set[str]()
        idle = {drawn for drawn in self.ahead[:most] if drawn.group is None and not self._beside.is_under_way(drawn)}
        self._follow()  # one that has ended since the last look is not under way, and its group is here now
        for place, drawn in enumerate(self.ahead[:most]):
            # Where steps take as many as they need, two of a query may come to lie in one. The second has to wait for
            # the next step, and would be too old there.
            is_second = self.sampling.dynamic_sampling and drawn.query.id in before
            before.add(drawn.query.id)
            if drawn in idle and not is_second:
                # Without staleness a step's random numbers are its own. The temperature may be of before a resume.
                key_step = drawn.key_step if self.sampling.max_staleness else self.steps + 1
                if (drawn.key_step, drawn.temperature) != (key_step, self.sampling.temperature):
                    changed: dict[str, Any] = {"key_step": key_step, "temperature": self.sampling.temperature}
                    drawn = self.ahead[place] = replace(drawn, **changed)
                missing.append(drawn)
        for key_step, part in groupby(missing, key=lambda each: each.key_step):
            batch, key = [*part], SamplingKey(seed=self.seed, step=key_step)
            is_needed = not {*self.ahead[:number]}.isdisjoint(batch)  # by the step under way
            has_failed = not self._beside.failed.isdisjoint(batch)
            if has_failed and not is_needed:
                continue
            if self.sampling.max_staleness and not self.sampling.in_turn and not has_failed:
                self._beside.start(batch, self.sampling, key, record_experts=self.record_experts)
                continue
            queries = [each.query for each in batch]
            with self._beside.sampling.open():
                groups = self.engine.sample(queries, self.sampling, key, record_experts=self.record_experts, **watched)
            self._beside.failed.clear()
            group_of = dict(zip(batch, groups, strict=True))
            self.ahead = [replace(each, group=group_of[each]) if each in group_of else each for each in self.ahead]

    def _land(self) -> None:
        """Put what threads have sampled into its places; raise what has ended one of them."""
        self._follow()
        self._beside.raise_failure()

    def _follow(self) -> None:
        changes = dict(self._beside.take_changes())
        for place, drawn in enumerate(self.ahead):
            while drawn in changes:
                drawn = self.ahead[place] = changes[drawn]

    def _leave_out_old(self) -> bool:
        """Groups of which any token is older than `max_staleness` steps, or was drawn at another temperature.

        Their queries are sampled again or, of what is too old, left out (`too_old: drop`). Whether there were any.
        """
        kept: list[Drawn] = []
        for drawn in self.ahead:
            is_old = drawn.group is not None and self._age(drawn.group) > self.sampling.max_staleness
            if drawn.group is None or not (is_old or drawn.temperature != self.sampling.temperature):
                kept.append(drawn)
                continue
            self.num_too_old += 1
            if not is_old or self.sampling.too_old == "refresh":
                kept.append(
                    replace(drawn, group=None, reward_seconds={}, logged={}, temperature=self.sampling.temperature)
                )
        has_changed, self.ahead = self.ahead != kept, kept
        return has_changed

    def _age(self, group: Group) -> int:
        """In steps, of its oldest token."""
        oldest = min(version for sample in group.samples for version, _ in sample.versions)
        return -(-(self.version - oldest) // self.updates_per_step)
