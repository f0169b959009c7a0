"""A key/value cache that is written in place, repeated for a group, and shrinks as responses end."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_SPARE_TOKENS = 32  # room added beyond need at each growth, so that most steps copy nothing


class InPlaceLayer(DynamicLayer):
    """One attention layer's keys and values [B, heads, T, dim] in buffers with room to grow.

    transformers' own layer concatenates, which copies the whole cache for every token.
    """

    _layer_type = None  # not the layer that transformers builds by itself

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' states and return views of all of them."""
        end = self._length + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            old = self._buffers
            room = end if old is None else max(2 * self._length, end) + _SPARE_TOKENS
            self._buffers = (
                _grown(key_states, old, self._length, room),
                _grown(value_states, old, self._length, room, 1),
            )
            self.is_initialized = True
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : end] = states
        self._length = end
        self._expose()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows named, in that order; a row may be named several times."""
        if self._buffers is not None:
            # A longer cache is copied at every growth; a repeated one (prefill to group) gets its room then.
            keys, values = (b[:, :, : self._length].index_select(0, beam_idx) for b in self._buffers)
            self._buffers = (keys, values)
            self._expose()

    def _expose(self) -> None:
        assert self._buffers is not None
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)


def in_place_cache(config: Any) -> DynamicCache:
    """An empty cache for the model: full-attention layers are written in place, other kinds are transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _grown(states: Tensor, old: tuple[Tensor, Tensor] | None, length: int, room: int, which: int = 0) -> Tensor:
    rows, heads, _, width = states.shape
    buffer = torch.empty(rows, heads, room, width, dtype=states.dtype, device=states.device)
    if old is not None:
        buffer[:, :, :length] = old[which][:, :, :length]
    return buffer
