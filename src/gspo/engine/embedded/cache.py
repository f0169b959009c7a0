"""A key/value cache that is written in place, repeated for a group, shrinks as responses end and takes in new rows.

What it holds of a response may be kept for a later prompt that begins with the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from gspo.engine.engine import Session

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

    def begin(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Take over buffers, and the states of the first tokens in them."""
        self._buffers, self.is_initialized = [keys, values], True
        self._expose(length)

    def part(self, row: int, columns: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, t, dim] of a row's tokens."""
        keys, values = self._buffers
        return keys[row, :, columns], values[row, :, columns]

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Past:
    """The keys, values and experts of the first tokens of a context."""

    ids: tuple[int, ...]
    keys: Float[Tensor, "L heads T dim"]
    values: Float[Tensor, "L heads T dim_v"]
    experts: Integer[Tensor, "T routers K"] | None  # on the CPU, where they are recorded

    def first(self, count: int) -> "Past":
        """Return the past of the first tokens alone."""
        experts = None if self.experts is None else self.experts[:count]
        keys, values = self.keys[:, :, :count], self.values[:, :, :count]
        return replace(self, ids=self.ids[:count], keys=keys, values=values, experts=experts)


class KeptPasts:
    """The pasts of what each response under way has read last."""

    def __init__(self) -> None:
        self._by_session = WeakKeyDictionary[Session, Past]()

    def put(self, session: Session, past: Past) -> None:
        """Keep one, instead of the session's last."""
        self._by_session.pop(session, None)
        self._by_session[session] = past

    def limit(self, most: int) -> None:
        """Keep no more than so many: those that were put first go."""
        sessions = [reference() for reference in self._by_session.keyrefs()]  # some may end in other threads
        for oldest in sessions[: max(len(sessions) - most, 0)]:
            if oldest is not None:
                self._by_session.pop(oldest, None)

    def has(self, session: Session | None) -> bool:
        """Tell whether one is kept."""
        return session is not None and session in self._by_session

    def take(self, session: Session, ids: Sequence[int]) -> Past | None:
        """Return what is known of the ids but the last, and keep it no longer; None: nothing."""
        past = self._by_session.pop(session, None)
        if past is None:
            return None
        most = min(len(past.ids), len(ids) - 1)
        differ = (place for place in range(most) if ids[place] != past.ids[place])
        count = most if past.ids[:most] == tuple(ids[:most]) else next(differ)
        return past.first(count) if count else None

    def clear(self) -> None:
        """Keep none: the weights are others."""
        self._by_session.clear()


def past_of(cache: DynamicCache, row: int, start: int, ids: Sequence[int], experts: Tensor | None) -> Past | None:
    """The past of a row's tokens, which begin at that column; None where layers differ in their shapes."""
    keys, values = zip(*(layer.part(row, slice(start, start + len(ids))) for layer in cache.layers), strict=True)
    if len({(own.shape, other.shape) for own, other in zip(keys, values, strict=True)}) > 1:
        return None
    return Past(ids=tuple(ids), keys=torch.stack(keys), values=torch.stack(values), experts=experts)


def cache_of_pasts(config: Any, pasts: Sequence[Past], *, most: int, room: int) -> DynamicCache:
    """A cache of a row for each past, aligned at their end; it has room for more tokens before it is copied."""
    width, cache = max(len(past.ids) for past in pasts), in_place_cache(config, most=most)

    def joined(states: Sequence[Tensor]) -> Tensor:
        heads, _, dim = states[0].shape
        buffer = states[0].new_zeros(len(states), heads, width + room + _SPARE_TOKENS, dim)
        for row, own in zip(buffer, states, strict=True):
            row[:, width - own.shape[1] : width] = own
        return buffer

    for number, layer in enumerate(cache.layers):  # each has memory of its own, which is free once it has grown
        keys, values = [past.keys[number] for past in pasts], [past.values[number] for past in pasts]
        layer.begin(joined(keys), joined(values), width)
    return cache
