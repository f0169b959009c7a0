"""A pack through the trunk: in one pass where its attention can be handed a pack, else padded block by block."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from gspo.model.attention import NAME, unpad
from gspo.model.packing import Block, Pack, TokenSequence, pack
from gspo.model.routing import Routing, traced


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What the trunk made of the tokens of a pack."""

    hidden: Float[Tensor, "N H"]  # the last hidden states
    experts: Integer[Tensor, "N L K"] | None = None  # the routers' own choice; None: no routers
    router_logits: tuple[Float[Tensor, "N E"], ...] = ()  # layer by layer, where they were asked for


def packed_pass(trunk: Any, layout: Pack, routing: Routing | None = None, *, keep_logits: bool = False) -> Pass:
    """One pass over the tokens laid end to end."""
    # A mask of four dimensions is handed on as it is: transformers would build one of N x N.
    no_mask = torch.zeros(1, 1, 1, 1, device=layout.ids.device)
    with traced(routing, layout.experts, keep_logits=keep_logits) as trace:
        output = trunk(
            input_ids=layout.ids[None],
            position_ids=layout.positions[None],
            attention_mask=no_mask,
            use_cache=False,
            layout=layout,
        )
    hidden = output.last_hidden_state[0]
    if trace is None:
        return Pass(hidden=hidden)
    return Pass(hidden=hidden, experts=trace.experts, router_logits=tuple(trace.logits))


def padded_pass(
    trunk: Any, layout: Pack, pad_id: int, routing: Routing | None = None, *, keep_logits: bool = False
) -> Pass:
    """One pass a block, whose rows are whole sequences padded on the right, where causality needs no mask."""
    hidden, experts, logits = [], [], []
    for block in layout.blocks:
        replay = None if layout.experts is None else _padded_experts(layout.experts[block.rows], block)
        with traced(routing, replay, keep_logits=keep_logits) as trace:
            output = trunk(input_ids=layout.padded_rows(block, pad_id), use_cache=False)
        hidden.append(unpad(output.last_hidden_state, block))
        if trace is not None:
            shape = (len(block.lengths), block.width)
            experts.append(unpad(trace.experts.unflatten(0, shape), block))
            logits.append([unpad(layer.unflatten(0, shape), block) for layer in trace.logits])
    return Pass(
        hidden=torch.cat(hidden),
        experts=torch.cat(experts) if experts else None,
        router_logits=tuple(torch.cat(layer) for layer in zip(*logits, strict=True)),
    )


def _padded_experts(experts: Integer[Tensor, "M L K"], block: Block) -> Integer[Tensor, "S L K"]:
    """Those of a block's rows, and the first K for the padding, which goes somewhere, too."""
    if block.place is None:
        return experts
    padding = torch.arange(experts.shape[-1], dtype=experts.dtype, device=experts.device)
    filled = padding.expand(len(block.lengths) * block.width, *experts.shape[1:]).clone()
    filled[block.place] = experts
    return filled


def enable_packing(model: Any, trunk: Any, hidden_size: int) -> bool:
    """Hand the model an attention that knows packs; False, and nothing changed, where that is not proven right.

    Proven: on two packs, one with a shared prompt, it gives the hidden states of plain passes.
    """
    before = model.config._attn_implementation
    if before != "sdpa":  # attention with sinks or soft caps, or none at all
        return False
    device, vocabulary = model.device, trunk.get_input_embeddings().weight.shape[0]
    prompt, response = tuple(number % vocabulary for number in range(1, 9)), torch.arange(3, 8) % vocabulary
    group = [TokenSequence(prompt_ids=prompt, response_ids=ids) for ids in (response, response[:2], response.flip(0))]
    sequences = [*group, TokenSequence(prompt_ids=prompt[:3], response_ids=response)]
    try:
        with torch.no_grad():
            alone = [pack([one], device=device, hidden_size=None) for one in sequences]
            plain = torch.cat([padded_pass(trunk, one, 0).hidden[one.predictors] for one in alone])
            model.set_attn_implementation(NAME)
            layout = pack(sequences, device=device, hidden_size=hidden_size)
            found = packed_pass(trunk, layout).hidden[layout.predictors]
        proven = same(found, plain)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        proven = False
    if not proven:
        model.set_attn_implementation(before)
    return proven


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two computations of the same states differ by no more than rounding, in bfloat16 a visible amount."""
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return bool(difference <= tolerance)  # NaN is not
