"""The in-place cache holds what transformers' own would, through growth, repetition and dropped rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from gspo.engine.embedded.cache import InPlaceLayer, in_place_cache
from gspo.model.policy import Policy

NewPolicy = Callable[..., Policy]


@pytest.mark.parametrize("first", [1, 5, 40])
def test_it_holds_what_transformers_own_layer_holds(first: int, new_policy: NewPolicy) -> None:
    config = new_policy("llama").model.config
    ours, theirs = in_place_cache(config, most=100), DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)
    rows = 3
    events: list[Any] = [first, torch.arange(3).repeat_interleave(2), *[1] * 40]
    events += [torch.tensor([5, 0, 3]), *[1] * 5, torch.tensor([1]), *[1] * 40]
    for event in events:
        if isinstance(event, torch.Tensor):
            ours.reorder_cache(event)
            theirs.reorder_cache(event)
            rows = len(event)
            continue
        for layer in range(2):
            states = torch.randn(2, rows, 1, event, 8, generator=generator)
            for found, expected in zip(
                ours.update(states[0], states[1], layer), theirs.update(states[0], states[1], layer), strict=True
            ):
                assert torch.equal(found, expected)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1, 0) == theirs.get_mask_sizes(1, 0)


def test_most_steps_copy_nothing(new_policy: NewPolicy) -> None:
    cache = in_place_cache(new_policy("llama").model.config, most=300)
    places = set()
    for _ in range(300):
        keys, _ = cache.update(torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8), 0)
        places.add(keys.data_ptr())
    assert len(places) <= 6


def test_windowed_layers_stay_transformers_own(new_policy: NewPolicy) -> None:
    kinds = [type(layer) for layer in in_place_cache(new_policy("qwen2").model.config, most=100).layers]
    assert kinds == [InPlaceLayer, DynamicSlidingWindowLayer]
