"""Many calls at once, each with a time limit that a stuck one cannot make others pay for."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from gspo.reward.reply import Reply

LONGEST_WAIT_SECONDS = 0.2  # between two looks at whether the run is to stop


class Host(Protocol):
    """Where a function's calls are made; all its methods are called by one thread."""

    def begin(self, events: "Events") -> None:
        """End what an interrupted step has left running; from now on events go to this queue."""

    def start(self, number: int, call: "Call") -> bool:
        """Start a call under a number of its own; False where there is no place for it now."""

    def grow(self, num_waiting: int) -> None:
        """Make places, as far as may be, for calls that wait; an event tells when one is there."""

    def settle(self, event: Any) -> Sequence[tuple[int, Reply | None]]:
        """The calls that an event of this host ends; None for one that must be made again, with no other beside it."""

    def cancel(self, number: int) -> float:
        """End a call; the seconds within which an event says that it is over, 0 where it is over now."""

    def kill(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        """End a call that cancelling has not ended, and those beside it: the calls at fault, and the others."""

    def end(self) -> None:
        """End whatever runs; no events come any more."""

    def close(self) -> None:
        """End the host's processes too; a later call starts new ones."""


Events = SimpleQueue[tuple[Host, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call to be made, of a function for `size` completions."""

    key: Any  # what its maker knows it by
    host: Host
    function: Callable[..., Any]
    is_async: bool
    arguments: Mapping[str, Any]
    size: int
    time_limit_seconds: float
    alone: bool = False  # with no other call in its process


class Finished(NamedTuple):
    """A call, what came of it, and the seconds it ran."""

    call: Call
    reply: Reply
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Running:
    call: Call
    started: float
    deadline: float
    cancelled: bool = False

    def finished(self, reply: Reply) -> Finished:
        limit = self.call.time_limit_seconds
        late = Reply(kind="timed_out", what=f"it ran over its time limit of {limit:g} s")
        return Finished(self.call, late if self.cancelled else reply, time.monotonic() - self.started)


def run_calls(waiting: deque[Call], check_stop: Callable[[], None] = lambda: None) -> Generator[Finished, None, None]:
    """Make the calls, which are taken out of the queue, in the order they finish; a call's clock starts when it does.

    More calls of the same hosts may be put in the queue while it goes on. However the loop over it ends, nothing is
    left running: close the generator where an exception may end that loop.
    """
    hosts = list(dict.fromkeys(call.host for call in waiting))
    events: Events = SimpleQueue()
    running: dict[int, _Running] = {}
    numbers = count()
    try:
        for host in hosts:
            host.begin(events)
        while waiting or running:
            check_stop()
            _start(waiting, running, numbers, len(hosts))
            yield from _settle(waiting, running, events)
    finally:
        for host in hosts:
            host.end()


def _start(waiting: deque[Call], running: dict[int, _Running], numbers: Iterator[int], num_hosts: int) -> None:
    """Start every waiting call that finds a place, each host's in their order."""
    full: set[Host] = set()
    for call in tuple(waiting):
        if len(full) == num_hosts:
            return
        if call.host in full:
            continue
        number = next(numbers)
        if call.host.start(number, call):
            waiting.remove(call)
            now = time.monotonic()
            running[number] = _Running(call=call, started=now, deadline=now + call.time_limit_seconds)
        else:
            full.add(call.host)
            call.host.grow(sum(other.host is call.host for other in waiting))


def _settle(waiting: deque[Call], running: dict[int, _Running], events: Events) -> Iterator[Finished]:
    """Wait for the next event, or for the next call to pass its deadline, and take what is over out of the running."""
    nearest = min((entry.deadline for entry in running.values()), default=float("inf"))
    try:
        host, event = events.get(timeout=min(max(0.0, nearest - time.monotonic()), LONGEST_WAIT_SECONDS))
    except Empty:
        yield from _give_up(waiting, running)
        return
    for number, reply in host.settle(event):
        if (entry := running.pop(number, None)) is None:
            continue
        if reply is None and not entry.cancelled:
            waiting.appendleft(replace(entry.call, alone=True))
        else:
            yield entry.finished(reply or Reply())


def _give_up(waiting: deque[Call], running: dict[int, _Running]) -> Iterator[Finished]:
    """Cancel the calls that have passed their deadline, or kill those that do not answer to that."""
    now = time.monotonic()
    for number in [number for number, entry in running.items() if entry.deadline <= now]:
        if (entry := running.get(number)) is None:
            continue  # ended with another
        at_fault, others = [number], list[int]()
        if entry.cancelled:
            at_fault, others = map(list, entry.call.host.kill(number))
        elif seconds := entry.call.host.cancel(number):
            running[number] = replace(entry, deadline=now + seconds, cancelled=True)
            continue
        waiting.extendleft(running.pop(other).call for other in others)
        for late in [running.pop(late) for late in at_fault]:
            yield replace(late, cancelled=True).finished(Reply())
