"""Attention over a pack. Everything else in a model works token by token and needs no padding."""

from collections import OrderedDict
from typing import Any

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gspo.model.packing import Block, Pack

NAME = "gspo_packed"


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b k t d"],
    value: Float[Tensor, "b k t e"],
    attention_mask: Tensor | None,
    *,
    layout: Pack | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' scaled dot-product attention; over a pack, which is a batch of one row, it runs block by block.

    A row attends causally to itself and to all of the prefix that it shares. Returns [b, n, h, d]. Raises
    NotImplementedError where a layer has a sliding window and does not pass it on.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if _slides(module) and kwargs.get("sliding_window") is None:
        raise NotImplementedError(f"{type(module).__name__} does not hand its sliding window to the attention function")
    tensors = [states[0].transpose(0, 1) for states in (query, key, value)]
    outputs = [part for block in layout.blocks for part in _block(module, tensors, block, kwargs)]
    return torch.cat(outputs)[None], None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for passes without a pack, such as decoding


def _block(module: nn.Module, tensors: list[Tensor], block: Block, kwargs: dict[str, Any]) -> list[Tensor]:
    """The attention of a block's prefix, if there is one, and of its rows, each [m, h, d]."""

    def attend(states: list[Tensor], width: int, prefix: int) -> Tensor:
        mask = _mask(width, prefix, kwargs.get("sliding_window"), states[0])
        output: Tensor = sdpa_attention_forward(module, *states, mask, **kwargs)[0]
        return output

    rows, outputs = [_pad(states[block.rows], block) for states in tensors], []
    if block.prefix:
        prefix = [states[None, block.start : block.start + block.prefix].transpose(1, 2) for states in tensors]
        outputs.append(attend(prefix, block.prefix, 0)[0])
        shared = [states.expand(len(block.lengths), -1, -1, -1) for states in prefix]
        rows = [rows[0], *(torch.cat([shared[number], rows[number]], dim=2) for number in (1, 2))]
    return [*outputs, unpad(attend(rows, block.width, block.prefix), block)]


def _slides(module: Any) -> bool:
    """Whether the layer's configuration limits its attention to a part of the past."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return kinds[module.layer_idx] != "full_attention"
    return getattr(config, "sliding_window", None) is not None


def _mask(width: int, prefix: int, window: int | None, like: Tensor) -> Tensor | None:
    """The mask of rows with a prefix before them; None where the kernel's causal mask is the right one."""
    if not prefix and (window is None or width <= window):
        return None
    key = (width, prefix, window, like.dtype, like.device)
    if key not in _masks:  # each layer of a pass asks for the same masks
        _masks[key] = _additive_mask(*key)
    _masks.move_to_end(key)
    while len(_masks) > 1 and sum(mask.nbytes for mask in _masks.values()) > MAX_MASK_BYTES:
        _masks.popitem(last=False)
    return _masks[key]


MAX_MASK_BYTES = 2**28  # of all masks that are kept; the mask in use is kept whatever its size
_masks: "OrderedDict[tuple[int, int, int | None, torch.dtype, torch.device], Tensor]" = OrderedDict()


def _additive_mask(
    width: int, prefix: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "1 1 s t"]:
    """0 where the query at prefix + i sees the key at j (j ≤ prefix + i, within the sliding window), else -inf."""
    shape = width, prefix + width
    mask = torch.full(shape, -torch.inf, dtype=dtype, device=device).triu_(prefix + 1)
    if window:
        mask += torch.full(shape, -torch.inf, dtype=dtype, device=device).tril_(prefix - window)
    return mask[None, None]


def _pad(states: Float[Tensor, "m h d"], block: Block) -> Float[Tensor, "r h s d"]:
    """The states of a block's tokens as rows of equal length, padded with 0."""
    rows = len(block.lengths)
    if block.place is not None:
        empty = states.new_zeros(rows * block.width, *states.shape[1:])
        states = empty.index_copy(0, block.place, states)
    return states.unflatten(0, (rows, block.width)).transpose(1, 2)


def unpad(output: Num[Tensor, "r s *rest"], block: Block) -> Num[Tensor, "m *rest"]:
    """The outputs of the tokens of a block's rows, without those of the padding."""
    flat = output.flatten(0, 1)
    return flat if block.place is None else take(flat, block.place)


def take(rows: Num[Tensor, "n *rest"], index: Int[Tensor, "m"]) -> Num[Tensor, "m *rest"]:
    """`rows[index]` for an index without repetitions: the gradient is a copy, not an addition row by row."""
    selected: Tensor = _Take.apply(rows, index)
    return selected


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.num_rows, *gradient.shape[1:]).index_copy_(0, index, gradient), None
