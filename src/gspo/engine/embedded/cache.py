"""A key/value cache that is written in place, repeated for a group, shrinks as responses end and takes in new rows."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_SPARE_TOKENS = 32  # room added beyond need at each growth, so that most steps copy nothing


class InPlaceLayer(DynamicLayer):
    """The keys and values [R, heads, T, dim] of an attention layer in buffers with room to grow.

    transformers' own layer concatenates, which copies the whole cache for every token.
    """

    _layer_type = None  # not the layer that transformers builds by itself

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most  # tokens that will ever be held
        self._buffers: list[Tensor] = []  # of keys and of values
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' states and return views of all of them."""
        end = self._length + key_states.shape[-2]
        if not self._buffers:
            self._buffers = [states.new_empty(states.shape) for states in (key_states, value_states)]
            self.is_initialized = True
        elif end > self._buffers[0].shape[-2]:
            self._move(end)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : end] = states
        self._expose(end)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return tokens held."""
        return self._length

    def reorder_cache(self, beam_idx: Int[Tensor, "K"]) -> None:
        """Keep the rows named, in that order; a row may be named several times."""
        if self._buffers:
            self._move(self._length + 1, beam_idx)  # the next token would copy a cache without room once more
            self._expose(self._length)

    def join(self, other: "InPlaceLayer", width: int) -> None:
        """Take in the rows of another cache; both keep their last tokens, at most `width`, aligned at the end."""
        for place, buffers in enumerate(zip(self._buffers, other._buffers, strict=True)):
            first = buffers[0]
            shape = (sum(map(len, buffers)), first.shape[1], width + _SPARE_TOKENS, first.shape[3])
            joined = first.new_zeros(shape)  # what is padding must be finite: it is multiplied by 0
            rows = joined.split([len(buffer) for buffer in buffers])
            for row, buffer, length in zip(rows, buffers, (self._length, other._length), strict=True):
                kept = min(length, width)
                row[:, :, width - kept : width] = buffer[:, :, length - kept : length]
            self._buffers[place] = joined
        self._most = width + max(self._most - self._length, other._most - other._length)
        self._expose(width)

    def _move(self, end: int, rows: Int[Tensor, "K"] | None = None) -> None:
        """Move all into new buffers for `end` tokens and, for growing copies, as many again, but never too many."""
        room = max(end, min(2 * self._length + _SPARE_TOKENS, self._most))
        for place, buffer in enumerate(self._buffers):
            num_rows = len(buffer) if rows is None else len(rows)
            moved = buffer.new_empty(num_rows, buffer.shape[1], room, buffer.shape[3])
            held, target = buffer[:, :, : self._length], moved[:, :, : self._length]
            if rows is None:
                target.copy_(held)
            else:
                torch.index_select(held, 0, rows, out=target)
            self._buffers[place] = moved

    def _expose(self, length: int) -> None:
        self._length = length
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


def in_place_cache(config: Any, *, most: int) -> DynamicCache:
    """An empty cache for at most that many tokens a row.

    Full-attention layers are written in place, other kinds are transformers' own.
    """
    cache = DynamicCache(config=config)
    cache.layers = [InPlaceLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def is_in_place(cache: DynamicCache | None) -> bool:
    """Tell whether there is a cache of which every layer keeps the whole past, in place."""
    return cache is not None and all(type(layer) is InPlaceLayer for layer in cache.layers)
