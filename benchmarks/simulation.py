"""Sampling beside training as discrete events: servers that decode, a trainer that updates, and the Source's rules.

Between two events a server has the same rows, so what it decodes meanwhile is known in closed form.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, groupby

PROBES, PROBE_TOKENS = 4, 16  # of the proof after each hand-over of weights
REQUESTS = 256  # of a server at once, of all steps that are asked for side by side


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds that things take; each side by itself, and how many times as long beside the other."""

    decode: Callable[[int], float]  # a token of each of so many rows, but for the reading of their cache
    held: float = 0.0  # what each token in the cache of a server's rows adds to that
    prefill: float = 0.0  # a token that is read; after new weights all that is held is read again
    publish: float = 0.0  # that a server stands still for new weights
    update: Callable[[int], float]  # of so many response tokens, and all that the trainer does in a step besides
    decode_beside: float = 1.0
    update_beside: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the recipe and the cluster say."""

    staleness: int
    queries: int  # a step
    servers: int = 1
    rows: int = 512  # at once on a server
    prompt: int = 1  # tokens
    requests: int = REQUESTS
    most_read: int = 2048  # tokens, while each row decodes one


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step took, in seconds, and its response tokens."""

    total: float
    waited: float  # for its groups
    tokens: int


@dataclass(kw_only=True)
class _Group:
    """A request: its rows decode on one server."""

    lengths: Sequence[int]
    prompt: int = 0  # tokens
    server: int = 0
    num_ended: int = 0  # rows
    ended: Callable[[], None] = lambda: None

    @property
    def is_ended(self) -> bool:
        return self.num_ended == len(self.lengths)


class _Server:
    """Rows that decode side by side; `position` counts the tokens that each would have had since the start."""

    def __init__(self, rates: Rates, most_rows: int) -> None:
        self.rates, self.most_rows = rates, most_rows
        self.rows: list[tuple[float, int, int, _Group]] = []  # a heap by the position at which they end
        self.waiting: deque[tuple[int, _Group]] = deque()
        self.time = self.position = self.held = self.reading = 0.0  # reading: seconds of prefill that come first
        self.pace = 1.0
        self.stamp = 0  # of the newest entry among the events
        self._order = count()

    def next_end(self) -> float:
        """When the next row ends."""
        if not self.rows:
            return math.inf
        steps = self.rows[0][0] - self.position
        each, growth = self._seconds_a_token()
        return self.time + self.pace * (self.reading + steps * each + growth * steps**2 / 2)

    def advance(self, time: float) -> None:
        """Decode until then; no row ends before."""
        left, self.time = (time - self.time) / self.pace, time
        if self.rows:
            read = min(left, self.reading)
            self.reading, left = self.reading - read, left - read
            each, growth = self._seconds_a_token()
            steps = 2 * left / (each + math.sqrt(each**2 + 2 * growth * left))
            self.position, self.held = self.position + steps, self.held + steps * len(self.rows)

    def _seconds_a_token(self) -> tuple[float, float]:
        """Now, and by how much each token makes the next one longer."""
        return self.rates.decode(len(self.rows)) + self.rates.held * self.held, self.rates.held * len(self.rows)

    def start(self, length: int, group: _Group) -> None:
        """A row begins to decode."""
        self.reading += group.prompt * self.rates.prefill / len(group.lengths)  # once for the group
        self.held += group.prompt
        heapq.heappush(self.rows, (self.position + length, next(self._order), length, group))

    def admit(self) -> None:
        """Start rows that wait, as many as there is room for."""
        while self.waiting and len(self.rows) < self.most_rows:
            self.start(*self.waiting.popleft())

    def pop_ended(self) -> list[_Group]:
        """A group for each row that has ended by now."""
        ended = []
        while self.rows and self.rows[0][0] <= self.position + 1e-6:
            _, _, length, group = heapq.heappop(self.rows)
            self.held = self.held - length - group.prompt if self.rows else 0.0
            ended.append(group)
        return ended


class _Engine:
    """All servers, and the clock."""

    def __init__(self, rates: Rates, setting: Setting) -> None:
        self.rates, self.time, self.most_read = rates, 0.0, setting.most_read
        self.servers = [_Server(rates, setting.rows) for _ in range(setting.servers)]
        self._events: list[tuple[float, int, int]] = []  # a heap of time, server and stamp

    def ask(self, group: _Group) -> None:
        """Have a group sampled by its server."""
        with self._changed(group.server) as server:
            server.waiting.extend((length, group) for length in group.lengths)
            server.admit()

    def wait(self, groups: Sequence[_Group]) -> None:
        """Until these have ended."""
        while not all(group.is_ended for group in groups):
            self._go(self._next())

    def compute(self, work: float) -> None:
        """The trainer computes for so many seconds, or longer where servers do beside it."""
        self._set_pace(self.rates.decode_beside)
        while work:
            pace = self.rates.update_beside if any(server.rows for server in self.servers) else 1.0
            end, event = self.time + work * pace, self._next()
            work = 0.0 if end <= event else work - (event - self.time) / pace
            self._go(min(end, event))
        self._set_pace(1.0)

    def publish(self) -> None:
        """New weights: all stands still, what is under way is read again, and the proof's tokens come first."""
        probe, later = _Group(lengths=[PROBE_TOKENS] * PROBES * len(self.servers)), list[float]()
        for number in range(len(self.servers)):
            with self._changed(number) as server:
                server.time += self.rates.publish
                reading = server.reading + server.held * self.rates.prefill
                server.reading = min(reading, PROBE_TOKENS * self.most_read * self.rates.prefill)
                later.append(reading - server.reading)
                for _ in range(PROBES):
                    server.start(PROBE_TOKENS, probe)
        self.time += self.rates.publish
        self.wait([probe])
        for number, reading in enumerate(later):
            with self._changed(number) as server:
                server.reading += reading

    def _set_pace(self, pace: float) -> None:
        for number in range(len(self.servers)):
            with self._changed(number) as server:
                server.pace = pace

    @contextmanager
    def _changed(self, number: int) -> Iterator[_Server]:
        """A server as it is now; after the block, when its next row ends is known anew."""
        server = self.servers[number]
        server.advance(self.time)
        yield server
        server.stamp += 1
        heapq.heappush(self._events, (server.next_end(), number, server.stamp))

    def _next(self) -> float:
        """The time of the next event."""
        while self._events and self._events[0][2] != self.servers[self._events[0][1]].stamp:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def _go(self, time: float) -> None:
        """Let everything happen until then."""
        assert time < math.inf
        while self._next() <= time:
            self.time, number, _ = heapq.heappop(self._events)
            with self._changed(number) as server:
                ended = server.pop_ended()
                server.admit()
            for group in ended:
                group.num_ended += 1
                if group.is_ended:
                    group.ended()
        self.time = time


def simulate(setting: Setting, rates: Rates, lengths: Callable[[int], Sequence[int]], *, steps: int) -> list[Step]:
    """So many steps, from the first one on; `lengths` has the tokens of the responses to the n-th query drawn."""
    engine, ahead, numbers, done = _Engine(rates, setting), deque[_Group](), count(), list[Step]()
    for step in range(steps):
        started = engine.time
        engine.publish()
        room = (min(setting.staleness, steps - step - 1) + 1) * setting.queries - len(ahead)
        places = range(len(ahead), len(ahead) + room)
        new = [_Group(lengths=lengths(next(numbers)), prompt=setting.prompt) for _ in places]
        ahead.extend(new)
        for _, flight in groupby(zip(places, new, strict=True), lambda own: own[0] // setting.queries):
            _fly(engine, [group for _, group in flight], setting)
        published = engine.time
        taken = [ahead.popleft() for _ in range(setting.queries)]
        engine.wait(taken)
        waited, tokens = engine.time - published, sum(sum(group.lengths) for group in taken)
        engine.compute(rates.update(tokens))
        done.append(Step(total=engine.time - started, waited=waited, tokens=tokens))
    return done


def _fly(engine: _Engine, groups: Sequence[_Group], setting: Setting) -> None:
    """Share out a step's groups to the servers in turn, and ask each for as many as it may have at once."""
    for server in range(setting.servers):
        left = deque(groups[server :: setting.servers])

        def ask(left: deque[_Group] = left) -> None:
            if left:
                engine.ask(left.popleft())

        for group in left:
            group.server, group.ended = server, ask
        for _ in range(min(len(left), max(1, setting.requests // (1 + setting.staleness)))):
            ask()
