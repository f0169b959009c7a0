"""The trunk's pass over a pack: all at once where its attention understands packs, else padded, block by block."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from gspo.model.attention import NAME, unpad
from gspo.model.packing import Block, Pack, TokenSequence, pack
from gspo.model.prove import disagreement, probe_ids
from gspo.model.routing import Routing, traced


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The trunk's output for the N tokens of a pack."""

    hidden: Float[Tensor, "N H"]  # the last hidden states
    experts: Integer[Tensor, "N L K"] | None = None  # the routers' choice, replayed or not; None without routers
    router_logits: tuple[Float[Tensor, "N E"], ...] = ()  # layer by layer, if the caller asked for them


def packed_pass(trunk: Any, layout: Pack, routing: Routing | None = None, *, keep_logits: bool = False) -> Pass:
    """One pass over the tokens laid end to end."""
    # A mask of four dimensions is handed on as it is: transformers would build one of N x N.
    no_mask = torch.zeros(1, 1, 1, 1, device=layout.ids.device)
    inputs = {"input_ids": layout.ids[None], "position_ids": layout.positions[None], "attention_mask": no_mask}
    with traced(routing, layout.experts, keep_logits=keep_logits) as trace:
        hidden = trunk(**inputs, use_cache=False, layout=layout).last_hidden_state[0]
    if trace is None:
        return Pass(hidden=hidden)
    return Pass(hidden=hidden, experts=trace.experts, router_logits=tuple(trace.logits))


def padded_pass(
    trunk: Any, layout: Pack, pad_id: int, routing: Routing | None = None, *, keep_logits: bool = False
) -> Pass:
    """One pass a block, whose rows are whole sequences padded on the right, where causality needs no mask."""
    passes = []
    for block in layout.blocks:
        replay = None if layout.experts is None else _padded_experts(layout.experts[block.rows], block)
        with traced(routing, replay, keep_logits=keep_logits) as trace:
            hidden = trunk(input_ids=layout.padded_rows(block, pad_id), use_cache=False).last_hidden_state
        outputs = [hidden]
        if trace is not None:
            outputs += [part.unflatten(0, hidden.shape[:2]) for part in (trace.experts, *trace.logits)]
        passes.append([unpad(output, block) for output in outputs])
    hidden, *rest = (torch.cat(parts) for parts in zip(*passes, strict=True))
    return Pass(hidden=hidden, experts=rest[0] if rest else None, router_logits=tuple(rest[1:]))


def _padded_experts(experts: Integer[Tensor, "M L K"], block: Block) -> Integer[Tensor, "S L K"]:
    """The experts of a block's rows; the padding, which is computed too, goes to the first K."""
    if block.place is None:
        return experts
    padding = torch.arange(experts.shape[-1], dtype=experts.dtype, device=experts.device)
    padded = padding.expand(len(block.lengths) * block.width, *experts.shape[1:]).clone()
    padded[block.place] = experts
    return padded


def enable_packing(model: Any, trunk: Any, hidden_size: int) -> bool:
    """Give the model an attention that understands packs; False, and no change, unless it is proven right.

    The proof: two packs, one with a shared prompt, have the hidden states of each sequence's plain pass.
    """
    before = model.config._attn_implementation
    if before != "sdpa":  # attention with sinks or soft caps, or no attention at all
        return False
    prompt, response = tuple(probe_ids(trunk).tolist()), probe_ids(trunk, 7)[2:].cpu()
    group = [TokenSequence(prompt_ids=prompt, response_ids=ids) for ids in (response, response[:2], response.flip(0))]
    sequences = [*group, TokenSequence(prompt_ids=prompt[:3], response_ids=response)]

    def plain() -> Tensor:
        packs = [pack([sequence], device=model.device, hidden_size=None) for sequence in sequences]
        return torch.cat([padded_pass(trunk, each, 0).hidden[each.predictors] for each in packs])

    def packed() -> Tensor:
        model.set_attn_implementation(NAME)
        layout = pack(sequences, device=model.device, hidden_size=hidden_size)
        return packed_pass(trunk, layout).hidden[layout.predictors]

    if disagreement(plain, packed) is None:
        return True
    model.set_attn_implementation(before)
    return False
