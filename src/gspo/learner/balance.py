"""How sequences are dealt to ranks, so that all have about as much to compute."""

from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate
from typing import Any

from gspo.model.shape import heads_of, inner_size


def cost(num_tokens: int, attention_share: float) -> float:
    """The cost of a sequence, in tokens: the products with weights, and attention, which grows with the square."""
    return num_tokens * (1 + num_tokens * attention_share)


def attention_share(text: Any) -> float:
    """The share that attention adds to a token's products with weights, for each token of its sequence.

    Each token multiplies all weights that it uses, in a layer and in its share of the head, and attends to half of the
    sequence on average, twice: to the keys, and to the values.
    """
    (heads, keys, size), hidden = heads_of(text), text.hidden_size
    weights = hidden * (2 * (heads + keys) * size + 3 * inner_size(text) + text.vocab_size / text.num_hidden_layers)
    return heads * size / weights


def shares(costs: Sequence[Sequence[float]], number: int) -> list[list[int]]:
    """The places of the items of each of a number of ranks: groups of items, given by their costs, dealt evenly.

    A group stays whole on a rank, since its items share work, unless a rank would have a twentieth more than the mean.
    Example: shares([[1, 1], [1, 1]], 2) == [[0, 1], [2, 3]].
    """
    single = [cost for group in costs for cost in group]
    ends = [*accumulate(map(len, costs))]
    places = [range(end - len(group), end) for end, group in zip(ends, costs, strict=True)]
    dealt = _dealt([sum(group) for group in costs], number)
    ranks = [sorted(place for index in indices for place in places[index]) for indices in dealt]
    totals = [sum(single[place] for place in own_places) for own_places in ranks]
    if max(totals) * len(totals) <= 1.05 * sum(totals):
        return ranks
    return [sorted(indices) for indices in _dealt(single, number)]


def _dealt(costs: Sequence[float], number: int) -> list[list[int]]:
    """The costliest first, each to the rank that has least so far."""
    ranks: list[list[int]] = [[] for _ in range(number)]
    totals = [(0.0, rank) for rank in range(number)]  # a heap
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        total, rank = totals[0]
        ranks[rank].append(index)
        heapreplace(totals, (total + costs[index], rank))
    return ranks
