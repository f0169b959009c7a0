"""A key/value cache that is written in place, repeated for a group, shrinks as responses end and takes in new rows."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_SPARE_TOKENS = 32  # room added beyond need at each growth, so that most steps copy nothing


class InPlaceLayer(DynamicLayer):
    """One attention layer's keys and values [R, heads, T, dim] in buffers with room to grow.

    transformers' own layer concatenates, which copies the whole cache for every token.
    """

    _layer_type = None  # not the layer that transformers builds by itself

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most  # tokens that will ever be held
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' states and return views of all of them."""
        end = self._length + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            old = self._buffers
            room = end if old is None else self._room(end)
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

    def reorder_cache(self, beam_idx: Int[Tensor, "K"]) -> None:
        """Keep the rows named, in that order; a row may be named several times."""
        if self._buffers is not None:
            # The next token would copy a cache without room once more.
            room = self._room(self._length + 1)
            keys, values = (_picked(buffer, beam_idx, self._length, room) for buffer in self._buffers)
            self._buffers = (keys, values)
            self._expose()

    def join(self, other: "InPlaceLayer", width: int) -> None:
        """Take in the rows of another cache; both keep their last tokens, at most `width`, aligned at the end."""
        assert self._buffers is not None and other._buffers is not None
        joined = []
        for own, theirs in zip(self._buffers, other._buffers, strict=True):
            shape = (len(own) + len(theirs), own.shape[1], width + _SPARE_TOKENS, own.shape[3])
            buffer = own.new_zeros(shape)  # what is padding must be finite: it is multiplied by 0
            for rows, part, length in (
                (slice(0, len(own)), own, self._length),
                (slice(len(own), None), theirs, other._length),
            ):
                kept = min(length, width)
                buffer[rows, :, width - kept : width] = part[:, :, length - kept : length]
            joined.append(buffer)
        self._most = width + max(self._most - self._length, other._most - other._length)
        self._buffers, self._length = (joined[0], joined[1]), width
        self._expose()

    def _room(self, end: int) -> int:
        """Columns to make room for where `end` are needed: twice as many, for growing copies, but never too many."""
        return max(end, min(2 * self._length + _SPARE_TOKENS, self._most))

    def _expose(self) -> None:
        assert self._buffers is not None
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)


def in_place_cache(config: Any, *, most: int) -> DynamicCache:
    """An empty cache for at most that many tokens a row.

    Full-attention layers are written in place, other kinds are transformers' own.
    """
    cache = DynamicCache(config=config)
    cache.layers = [InPlaceLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def is_in_place(cache: DynamicCache) -> bool:
    """Whether every layer keeps the whole past, in place."""
    return all(type(layer) is InPlaceLayer for layer in cache.layers)


def _picked(
    buffer: Float[Tensor, "R h t d"], rows: Int[Tensor, "K"], length: int, room: int
) -> Float[Tensor, "K h T d"]:
    picked = buffer.new_empty(len(rows), buffer.shape[1], room, buffer.shape[3])
    torch.index_select(buffer[:, :, :length], 0, rows, out=picked[:, :, :length])
    return picked


def _grown(
    states: Float[Tensor, "R h t d"], old: tuple[Tensor, Tensor] | None, length: int, room: int, which: int = 0
) -> Float[Tensor, "R h T d"]:
    rows, heads, _, width = states.shape
    buffer = torch.empty(rows, heads, room, width, dtype=states.dtype, device=states.device)
    if old is not None:
        buffer[:, :, :length] = old[which][:, :, :length]
    return buffer
