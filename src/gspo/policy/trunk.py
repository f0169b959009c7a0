"""Hidden states of a pack: in one pass where the model's attention can be handed a pack, else padded block by block."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.policy.attention import NAME, unpad
from gspo.policy.packing import Conditioned, Pack, pack


def packed_states(trunk: Any, layout: Pack) -> Float[Tensor, "N H"]:
    """One pass over the tokens laid end to end."""
    # A mask of four dimensions is handed on as it is: transformers would build one of N x N.
    no_mask = torch.zeros(1, 1, 1, 1, device=layout.ids.device)
    output = trunk(
        input_ids=layout.ids[None],
        position_ids=layout.positions[None],
        attention_mask=no_mask,
        use_cache=False,
        layout=layout,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def padded_states(trunk: Any, layout: Pack, pad_id: int) -> Float[Tensor, "N H"]:
    """One pass a block, whose rows are whole sequences padded on the right, where causality needs no mask."""
    passes = (trunk(input_ids=layout.padded_rows(block, pad_id), use_cache=False) for block in layout.blocks)
    states = [unpad(output.last_hidden_state, block) for output, block in zip(passes, layout.blocks, strict=True)]
    return torch.cat(states)


def enable_packing(model: Any, trunk: Any, hidden_size: int) -> bool:
    """Hand the model an attention that knows packs; False, and nothing changed, where that is not proven right.

    Proven: on two packs, one with a shared prompt, it gives the hidden states of plain passes.
    """
    before = model.config._attn_implementation
    if before != "sdpa":  # attention with sinks or soft caps, or none at all
        return False
    device, vocabulary = model.device, trunk.get_input_embeddings().weight.shape[0]
    prompt, response = tuple(number % vocabulary for number in range(1, 9)), torch.arange(3, 8) % vocabulary
    group = [Conditioned(prompt_ids=prompt, response_ids=ids) for ids in (response, response[:2], response.flip(0))]
    sequences = [*group, Conditioned(prompt_ids=prompt[:3], response_ids=response)]
    try:
        with torch.no_grad():
            alone = [pack([one], device=device, hidden_size=None) for one in sequences]
            plain = torch.cat([padded_states(trunk, one, 0)[one.predictors] for one in alone])
            model.set_attn_implementation(NAME)
            layout = pack(sequences, device=device, hidden_size=hidden_size)
            found = packed_states(trunk, layout)[layout.predictors]
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
