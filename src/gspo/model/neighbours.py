"""A sequence's likelihood is its own: what stands beside it in a pass, or comes after it, must not change it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gspo.errors import UserError
from gspo.model.packing import TokenSequence, pack
from gspo.model.prove import MISFITS, disagreement, probe_ids
from gspo.model.trunk import padded_pass


def check_padding(model: Any, trunk: Any) -> None:
    """Raise UserError where a padded row has other states than its prefixes alone; packs are proven by themselves."""
    ids, spans = probe_ids(trunk).tolist(), ((0, 3, 8), (1, 3, 8), (3, 4, 5))  # the first two share a block
    rows = [TokenSequence(prompt_ids=(*ids[i:j],), response_ids=torch.tensor(ids[j:k])) for i, j, k in spans]
    layout = pack(rows, device=model.device, hidden_size=None)
    prefixes = [torch.tensor([ids[i:end]], device=model.device) for i, j, k in spans for end in range(j, k)]
    reason = disagreement(
        lambda: torch.cat([trunk(input_ids=ids, use_cache=False).last_hidden_state[0, -1:] for ids in prefixes]),
        lambda: padded_pass(trunk, layout).hidden[layout.predictors],
    )
    if reason is not None:
        problem = f"{type(model).__name__} does not read each row by itself, from left to right: {reason}"
        raise UserError(problem, where="model.path", fix="take a causal language model")


def check_positions(model: Any, *, shortest: int, longest: int, where: str) -> None:
    """Raise UserError where sequences of `shortest` to `longest` tokens change each other's positions in a pass.

    The model need not have its weights: its rotary modules are made anew, for some keep the longest table so far.
    """
    for table in _tables(model):
        usual = table(shortest, shortest)
        lengths = range(shortest, longest + 1)
        most = shortest - 1 + bisect_left(lengths, True, key=lambda n: not table(shortest, n).equal(usual))
        if most < longest:
            what = f"the table of positions (rope_parameters) is another one in a pass over more than {most} tokens"
            what += f", and here sequences have {shortest} to {longest}: they would change each other's likelihoods"
            keys = "rollout.max_new_tokens, a suite's max_new_tokens or queries.max_prompt_tokens"
            raise UserError(what, where=where, fix=f"keep prompt and response within {most} tokens: lower {keys}")


def _tables(model: Any) -> Iterator[Callable[[int, int], Tensor]]:
    """Yield functions of two lengths: a rotary module's table for the first positions, in a pass up to the second."""
    for module in model.modules():
        if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            continue
        for kind in sorted({*(getattr(module, "layer_types", None) or [None])}):

            def table(num_tokens: int, longest: int, module: Any = module, kind: Any = kind) -> Tensor:
                with torch.device("cpu"), torch.no_grad():
                    positions = torch.tensor([[*range(num_tokens), longest - 1]])
                    output = type(module)(module.config)(torch.zeros(1), positions, *([kind] if kind else []))
                    parts = [torch.view_as_real(output)] if isinstance(output, Tensor) else output
                    return torch.cat([part[:, :num_tokens].flatten() for part in parts])

            try:
                table(1, 1)
            except MISFITS:  # it is made or called in a way of its own
                continue
            yield table
