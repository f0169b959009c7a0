"""The trunk's pass over a pack: all at once where its attention understands packs, else padded, block by block.

Attention alone must know of packs. Everything else in a model works token by token and needs no padding.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gspo.model.packing import Block, Pack, TokenSequence, pack
from gspo.model.prove import MISFITS, computing_in, disagreement, probe_ids, trunk_states
from gspo.model.routing import Routing, traced

NAME = "gspo_packed"
MAX_MASK_BYTES = 2**28  # of all masks that are kept; the mask in use is kept whatever its size
_masks: "OrderedDict[tuple[int, int, int | None, torch.dtype, torch.device], Tensor]" = OrderedDict()


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The trunk's output for the N tokens of a pack.

    Example: of 10 tokens through 2 routers, hidden is [10, H], experts is [10, 2, K].
    """

    hidden: Float[Tensor, "N H"]  # the last hidden states
    experts: Integer[Tensor, "N L K"] | None = None  # the routers' choice, replayed or not; None without routers
    router_logits: tuple[Float[Tensor, "N E"], ...] = ()  # layer by layer, if the caller asked for them


def packed_pass(trunk: Any, layout: Pack, routing: Routing | None = None, *, keep_logits: bool = False) -> Pass:
    """Make a pass over the tokens laid end to end."""
    # A mask of four dimensions is handed on as it is: transformers would build one of N x N.
    no_mask = torch.zeros(1, 1, 1, 1, device=layout.ids.device)
    inputs = {"input_ids": layout.ids[None], "position_ids": layout.positions[None], "attention_mask": no_mask}
    with traced(routing, layout.experts, keep_logits=keep_logits) as trace:
        hidden = trunk(**inputs, use_cache=False, layout=layout).last_hidden_state[0]
    if trace is None:
        return Pass(hidden=hidden)
    return Pass(hidden=hidden, experts=trace.experts, router_logits=trace.router_logits)


def padded_pass(trunk: Any, layout: Pack, routing: Routing | None = None, *, keep_logits: bool = False) -> Pass:
    """Make a pass a block, whose rows are whole sequences padded on the right, where causality needs no mask."""
    passes = []
    for block in layout.blocks:
        replay = None if layout.experts is None else block.pad(layout.experts[block.rows]).flatten(0, 1)
        with traced(routing, replay, keep_logits=keep_logits) as trace:
            hidden = trunk(input_ids=block.pad(layout.ids[block.rows]), use_cache=False).last_hidden_state
        outputs = [hidden]
        if trace is not None:
            outputs += [part.unflatten(0, hidden.shape[:2]) for part in (trace.experts, *trace.router_logits)]
        passes.append([block.unpad(output) for output in outputs])
    hidden, *rest = (torch.cat(parts) for parts in zip(*passes, strict=True))
    return Pass(hidden=hidden, experts=rest[0] if rest else None, router_logits=tuple(rest[1:]))


def enable_packing(model: Any, trunk: Any, hidden_size: int) -> bool:
    """Give the model an attention that understands packs; False, and no change, unless it is proven right.

    The proof: packs with a shared prompt have the hidden states of each sequence's plain pass. At half precision they
    also have them in float32, where a single layer that is wrong cannot hide behind rounding.
    """
    before = model.config._attn_implementation
    if before != "sdpa":  # attention with sinks or soft caps, or no attention at all
        return False
    precisions: list[Callable[[], AbstractContextManager[None]]] = [nullcontext]
    if next(trunk.parameters()).dtype.itemsize < 4 and not isinstance(model, FSDPModule):
        with suppress(*MISFITS), torch.no_grad(), computing_in(torch.float32, model):
            trunk_states(trunk)  # not every model can
            precisions.append(partial(computing_in, torch.float32, model))
    for first, precision in product((0, 15), precisions):
        with precision():
            is_right = _packs_are_right(model, trunk, hidden_size, probe_ids(trunk, 15, first=first).cpu())
        if not is_right:
            break
    model.set_attn_implementation(NAME if is_right else before)
    return is_right


def _packs_are_right(model: Any, trunk: Any, hidden_size: int, ids: Int[Tensor, "15"]) -> bool:
    prompt, response = tuple(ids[:8].tolist()), ids[8:13]
    group = [TokenSequence(prompt_ids=prompt, response_ids=ids) for ids in (response, response[:2], response.flip(0))]
    sequences = [*group, TokenSequence(prompt_ids=tuple(ids[12:].tolist()), response_ids=response)]

    def states(sequences: list[TokenSequence], hidden_size: int | None) -> Tensor:
        model.set_attn_implementation("sdpa" if hidden_size is None else NAME)
        layout = pack(sequences, device=model.device, hidden_size=hidden_size)
        run = padded_pass if hidden_size is None else packed_pass
        return run(trunk, layout).hidden[layout.predictors]

    def plain() -> Tensor:
        return torch.cat([states([sequence], None) for sequence in sequences])

    return disagreement(plain, lambda: states(sequences, hidden_size), beside=lambda: states(sequences, None)) is None


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
    outputs = [part for block in layout.blocks for part in _block_attention(module, tensors, block, kwargs)]
    return torch.cat(outputs)[None], None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for passes without a pack, such as decoding


def _block_attention(module: nn.Module, tensors: list[Tensor], block: Block, kwargs: dict[str, Any]) -> list[Tensor]:
    """The attention of a block's prefix, if there is one, and of its rows, each [m, h, d]."""

    def attend(states: list[Tensor], width: int, prefix: int) -> Tensor:
        mask = _mask(width, prefix, kwargs.get("sliding_window"), states[0])
        output: Tensor = sdpa_attention_forward(module, *states, mask, **kwargs)[0]
        return output

    rows, outputs = [block.pad(states[block.rows]).transpose(1, 2) for states in tensors], []
    if block.prefix:
        prefix = [states[None, block.start : block.start + block.prefix].transpose(1, 2) for states in tensors]
        outputs.append(attend(prefix, block.prefix, 0)[0])
        shared = [states.expand(len(block.lengths), -1, -1, -1) for states in prefix]
        rows = [rows[0], *(torch.cat([shared[number], rows[number]], dim=2) for number in (1, 2))]
    return [*outputs, block.unpad(attend(rows, block.width, block.prefix))]


def _slides(module: Any) -> bool:
    """Tell whether the layer's configuration limits its attention to a part of the past."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return kinds[module.layer_idx] != "full_attention"
    return getattr(config, "sliding_window", None) is not None


def _mask(width: int, prefix: int, window: int | None, like: Tensor) -> Tensor | None:
    """The mask of rows with a prefix before them; None where the kernel's causal mask is the right one.

    It is 0 where the query at prefix + i sees the key at j (j ≤ prefix + i, within the sliding window), else -inf.
    """
    if not prefix and (window is None or width <= window):
        return None
    key = (width, prefix, window, like.dtype, like.device)
    if key not in _masks:  # each layer of a pass asks for the same masks
        nowhere = torch.full((width, prefix + width), -torch.inf, dtype=like.dtype, device=like.device)
        future = nowhere.triu(prefix + 1)
        _masks[key] = (future + nowhere.tril_(prefix - window) if window else future)[None, None]
    _masks.move_to_end(key)
    while len(_masks) > 1 and sum(mask.nbytes for mask in _masks.values()) > MAX_MASK_BYTES:
        _masks.popitem(last=False)
    return _masks[key]
