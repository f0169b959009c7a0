"""The age of tokens, in steps: of each span of a response its own."""

from dataclasses import replace

import numpy as np
from tests.samples import query_of, sample_of

from gspo.metrics.staleness import source_metrics, staleness_metrics
from gspo.types import Batch, Drawn, Group, Timeline


def test_each_token_is_as_old_as_the_weights_that_drew_it() -> None:
    one = replace(sample_of(query_of([1]), [4] * 6), versions=((8, 1), (12, 3), (20, 2)))
    other = replace(sample_of(query_of([1]), [4] * 2), versions=((20, 2),))
    batch = Batch(groups=(Group(samples=(one, other)),), version=20, num_too_old=3)
    assert staleness_metrics(batch, updates_per_step=4) == {
        "staleness/mean": (3 * 1 + 2 * 3) / 8,
        "staleness/max": 3.0,
        "staleness/tokens_by_age": [4.0, 0.0, 3.0, 1.0],
        "staleness/dropped_groups": 3.0,
    }


def test_where_all_is_of_now_nothing_is_old() -> None:
    sample = replace(sample_of(query_of([1]), [4] * 2), versions=((20, 2),))
    line = staleness_metrics(Batch(groups=(Group(samples=(sample, sample)),), version=20), updates_per_step=4)
    assert (line["staleness/mean"], line["staleness/max"], line["staleness/tokens_by_age"]) == (0.0, 0.0, [4.0])


def test_what_is_ahead_is_sampled_or_in_flight() -> None:
    query = query_of([1])
    sampled = Drawn(query=query, key_step=1, group=Group(samples=(sample_of(query, [4]),)))
    timeline = Timeline(seconds=4.0, waited=[(0.0, 1.0)], sampled=[(0.5, 1.0), (2.0, 3.5)])
    assert source_metrics([sampled, Drawn(query=query, key_step=2), sampled], timeline) == {
        "source/in_flight": 1.0,
        "source/waiting": 2.0,
        "source/trainer_idle_fraction": 0.25,
        "source/engine_idle_fraction": 0.5,
        "source/trainer_waited_seconds": [0.0, 1.0],
        "source/engine_sampled_seconds": [0.5, 1.0, 2.0, 3.5],
    }
    assert np.isnan(source_metrics([], None)["source/engine_idle_fraction"])  # another process has begun the step
