"""Which queries a step takes: a pure function of the step, so that a resumed run needs no state."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gspo.errors import UserError


def check_enough_queries(num_queries: int, queries_per_step: int) -> None:
    """UserError where a step would have to take the same query twice."""
    if num_queries < queries_per_step:
        raise UserError(
            f"a step takes {queries_per_step} different queries and the data has {num_queries} for training",
            where="rollout.queries_per_step",
            fix=f"set rollout.queries_per_step to {num_queries} or less, or give more data",
        )


def query_indices(step: int, *, num_queries: int, queries_per_step: int, seed: int, shuffle: bool) -> list[int]:
    """The indices of a step's queries, steps counted from 0.

    Every query comes once an epoch; a step may straddle two epochs and still takes no query twice.
    """
    check_enough_queries(num_queries, queries_per_step)
    first = step * queries_per_step
    positions = range(first, first + queries_per_step)
    if not shuffle:
        return [position % num_queries for position in positions]
    orders = {
        epoch: _epoch_order(epoch, num_queries, queries_per_step, seed) for epoch in _epochs(positions, num_queries)
    }
    return [int(orders[position // num_queries][position % num_queries]) for position in positions]


def _epochs(positions: range, num_queries: int) -> range:
    return range(positions[0] // num_queries, positions[-1] // num_queries + 1)


@lru_cache(maxsize=4)
def _epoch_order(epoch: int, num_queries: int, queries_per_step: int, seed: int) -> NDArray[np.int64]:
    if num_queries < 2 * queries_per_step:
        # Any stretch of one order repeated is free of doubles. Fresh orders here would each depend on the one before.
        return _permutation(0, num_queries, seed)
    order = _permutation(epoch, num_queries, seed)
    num_head = -epoch * num_queries % queries_per_step  # this epoch's share of the step that straddles its start
    if num_head == 0:
        return order
    # The previous epoch's last queries are in that step too: they give way to the next ones in line. That moves
    # nothing past position queries_per_step, so this epoch's own tail, which the next one avoids, stays as drawn.
    tail = _permutation(epoch - 1, num_queries, seed)[num_head - queries_per_step :]
    front = order[:queries_per_step]
    clashes = np.isin(front, tail)
    return np.concatenate([front[~clashes], front[clashes], order[queries_per_step:]])


@lru_cache(maxsize=4)
def _permutation(epoch: int, num_queries: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_queries)
