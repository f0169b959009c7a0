"""The processes that train one model together: which of them this one is, and what they tell each other.

One process is a rank of one. Every function but the first two is a collective: all ranks have to call it.
"""

from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def num_ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(value: T) -> list[T]:
    """What every rank has given, in their order. It is pickled: ranks trust each other."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


def highest(value: int) -> int:
    """The highest number that any rank has given."""
    if num_ranks() == 1:
        return value
    number = torch.tensor(value)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def shares(costs: Sequence[Sequence[float]], number: int) -> list[list[int]]:
    """The places of the items of each of a number of ranks: groups of items, given by their costs, dealt evenly.

    A group stays whole on a rank, since its items share work, unless a rank would have a twentieth more than the mean.
    Example: shares([[1, 1], [1, 1]], 2) == [[0, 1], [2, 3]].
    """
    single = [cost for group in costs for cost in group]
    ends = [*accumulate(map(len, costs))]
    places = [range(end - len(group), end) for end, group in zip(ends, costs, strict=True)]
    dealt = _dealt([sum(group) for group in costs], number)
    ranks = [sorted(place for index in own for place in places[index]) for own in dealt]
    totals = [sum(single[place] for place in own) for own in ranks]
    if max(totals) * len(totals) <= 1.05 * sum(totals):
        return ranks
    return [sorted(own) for own in _dealt(single, number)]


def _dealt(costs: Sequence[float], number: int) -> list[list[int]]:
    """The costliest first, each to the rank that has least so far."""
    ranks: list[list[int]] = [[] for _ in range(number)]
    totals = [(0.0, own) for own in range(number)]  # a heap
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        total, own = totals[0]
        ranks[own].append(index)
        heapreplace(totals, (total + costs[index], own))
    return ranks
