"""Which queries a step takes.

In the order of epochs that is a pure function of the step, so that a resumed run needs no state. The sampler
`difficulty` draws queries that the policy answers now and then more often than others.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from gspo.types import Group, Query

# By query: the rate at which its responses pass, as far as it is remembered, and after which step it was last seen.
PassRates = Mapping[str, tuple[float, int]]

SEED = 1  # of the sampler's random numbers, which are not those of an epoch's order
SOURCES = 2  # the same, of the draw of sources
MEMORY = 0.5  # of a query's rate, where it is seen again
FADING = 0.98  # a step that passes without it brings what is remembered so much nearer to not knowing
LEAST = 0.1  # of the weight of a query that passes every second time: none is forgotten


def query_indices(step: int, *, num_queries: int, queries_per_step: int, seed: int, shuffle: bool) -> list[int]:
    """The indices of a step's queries, steps counted from 0.

    Every query comes once an epoch; a step may straddle two epochs and still takes no query twice. A step takes no more
    queries than there are, which `load_rows` makes sure of.
    """
    positions = [divmod(step * queries_per_step + slot, num_queries) for slot in range(queries_per_step)]
    if not shuffle:
        return [place for _, place in positions]
    # One order repeated has no query twice in a step. Fresh orders would each depend on the one before.
    is_small = num_queries < 2 * queries_per_step

    def order(epoch: int) -> NDArray[np.int64]:
        epoch = 0 if is_small else epoch
        return _epoch_order((seed, epoch), num_queries, epoch * num_queries % queries_per_step, queries_per_step)

    return [int(order(epoch)[place]) for epoch, place in positions]


def sources_of(number: int, shares: Mapping[str, float], *, queries_per_step: int, seed: int) -> list[str]:
    """The source of each query of the batch of that number, in their order.

    Of a share w of Q queries they are ⌊wQ⌋ or ⌈wQ⌉, and wQ in the mean (systematic sampling).
    """
    rng = np.random.default_rng([seed, SOURCES, number])
    ends = np.cumsum([*shares.values()])
    points = (float(rng.random(dtype=np.float32)) + np.arange(queries_per_step)) / queries_per_step  # all below 1
    names = [*shares]
    return [names[index] for index in rng.permutation(np.searchsorted(ends / ends[-1], points, side="right"))]


def indices_of_source(
    name: str, taken: int, number: int, *, num_queries: int, queries_per_step: int, seed: int, shuffle: bool
) -> list[int]:
    """The indices of a source's next queries, at most those of a step, after so many that were taken.

    Every query comes once before any comes again, and none twice in a step; `load_rows` makes sure that there are
    enough.
    """
    positions = [divmod(taken + slot, num_queries) for slot in range(number)]
    if not shuffle:
        return [place for _, place in positions]
    num_free, key = num_queries - queries_per_step, (seed, crc32(name.encode()))

    def order(epoch: int) -> NDArray[np.int64]:
        if epoch == 0 or num_free < 2 * queries_per_step:  # one order repeated
            return _epoch_order((*key, 0), num_queries, 0, 0)
        # Which step straddles its start is not known: no query of the last step may be among those of the first.
        return _epoch_order((*key, epoch), num_queries, queries_per_step, num_free)

    return [int(order(epoch)[place]) for epoch, place in positions]


@lru_cache(maxsize=16)  # the two epochs that a step may straddle, of several sources
def _epoch_order(key: tuple[int, ...], num_queries: int, num_before: int, num_moved: int) -> NDArray[np.int64]:
    """The order of an epoch, the last number of its key.

    A step that straddles its start takes the last `num_before` queries of the epoch before. Those of them that stand
    among this order's first `num_moved` move back, behind the others of these. The order's end, which the next epoch
    avoids, stays as drawn.
    """
    order = np.random.default_rng(key).permutation(num_queries)
    if num_before == 0:
        return order
    before = np.random.default_rng((*key[:-1], key[-1] - 1)).permutation(num_queries)[-num_before:]
    first = order[:num_moved]
    clashes = np.isin(first, before)
    return np.concatenate([first[~clashes], first[clashes], order[num_moved:]])


def remembered(rates: PassRates, groups: Sequence[Group], *, threshold: float, step: int) -> PassRates:
    """The rates after a step's groups, of all that were sampled for it; unscored samples say nothing."""
    after = dict(rates)
    for group in groups:
        judged = [next(iter(s.score.parts.values()), None) for s in group.samples if s.score is not None]
        passed = [number >= threshold for number in judged if number is not None]
        if passed:
            rate = sum(passed) / len(passed)
            before = after.get(group.query.id)
            after[group.query.id] = (rate if before is None else MEMORY * before[0] + (1 - MEMORY) * rate, step)
    return after


def weights_of(queries: Sequence[Query], rates: PassRates, *, step: int) -> list[float]:
    """The weight of each query: 4 p (1 - p), at least `LEAST`, and p is ½ where nothing is known.

    A group of n responses has different rewards with the probability 1 - pⁿ - (1 - p)ⁿ, which is largest at ½, too.
    """
    weights = list[float]()
    for query in queries:
        rate, seen = rates.get(query.id, (0.5, step))
        rate = 0.5 + (rate - 0.5) * FADING ** (step - seen)
        weights.append(max(LEAST, 4 * rate * (1 - rate)))
    return weights


def drawn_indices(number: int, weights: Sequence[float], *, queries_per_step: int, seed: int) -> list[int]:
    """The different queries of the batch of that number: each next one is drawn by the weights of those left.

    They are the largest of log w + G, where G are Gumbel's random numbers (Gumbel top-k, arXiv 1903.06059).
    """
    noise = np.random.default_rng([seed, SEED, number]).gumbel(size=len(weights))
    return [int(index) for index in np.argsort(-(np.log(weights) + noise), kind="stable")[:queries_per_step]]
