"""Which queries a step takes: a pure function of the step, so that a resumed run needs no state."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def query_indices(step: int, *, num_queries: int, queries_per_step: int, seed: int, shuffle: bool) -> list[int]:
    """The indices of a step's queries, steps counted from 0.

    Every query comes once an epoch; a step may straddle two epochs and still takes no query twice. A step takes no more
    queries than there are, which `load_rows` makes sure of.
    """
    positions = [divmod(step * queries_per_step + slot, num_queries) for slot in range(queries_per_step)]
    if not shuffle:
        return [place for _, place in positions]
    return [int(_epoch_order(epoch, num_queries, queries_per_step, seed)[place]) for epoch, place in positions]


@lru_cache(maxsize=2)  # the two epochs that a step may straddle
def _epoch_order(epoch: int, num_queries: int, queries_per_step: int, seed: int) -> NDArray[np.int64]:
    if num_queries < 2 * queries_per_step:
        epoch = 0  # One order repeated has no query twice in a step. Fresh orders would each depend on the one before.
    order = np.random.default_rng([seed, epoch]).permutation(num_queries)
    num_before = epoch * num_queries % queries_per_step
    if num_before == 0:
        return order
    # The step that straddles this epoch's start takes the last queries of the epoch before. Those of them that stand
    # among this order's first move back, behind the others of the first `queries_per_step`. The order's end, which
    # the next epoch avoids, stays as drawn.
    before = np.random.default_rng([seed, epoch - 1]).permutation(num_queries)[-num_before:]
    first = order[:queries_per_step]
    clashes = np.isin(first, before)
    return np.concatenate([first[~clashes], first[clashes], order[queries_per_step:]])
