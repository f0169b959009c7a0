"""Parameters of a model: those that a recipe chooses by patterns of their names, and those that ranks share."""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gspo.errors import UserError, listed


def trunk_of(model: Any) -> Any:
    """The module of a causal language model that maps token ids to hidden states."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def layers_of(model: Any) -> Any:
    """The layers of a causal language model, in a list module; None where they are not found."""
    trunk = trunk_of(model)
    return getattr(trunk, "layers", getattr(trunk, "h", None))


def matching(patterns: Sequence[str], names: Iterable[str], *, where: str) -> set[str]:
    """The names that any of the patterns matches; UserError for a pattern that matches none of them."""
    names, chosen = list(names), set[str]()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            kinds = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
            raise UserError(f"{pattern!r} matches no parameter", where=where, fix=f"there are: {listed(kinds, 12)}")
        chosen |= matches
    return chosen


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the parameters of these names, and those tied to them, out of training; UserError where none are left."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones under each of their names
    for name in matching(patterns, parameters, where="model.frozen"):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        fix = "leave some of them out"
        raise UserError("these patterns match every parameter: nothing is left to train", where="model.frozen", fix=fix)


def saved_part(tensor: Tensor, *, is_first: bool) -> Tensor | None:
    """Return what a rank, the first or another, saves of a tensor: its rows of a shared one, the first any other.

    None: another rank saves it. The rows of ranks 0, 1, … one after the other are the whole.
    """
    if not isinstance(tensor, DTensor):
        return tensor if is_first else None
    *copy, _ = tensor.device_mesh.get_coordinate() or ()
    return None if any(copy) else tensor.to_local()


def like(tensor: Tensor, shared: Tensor) -> Tensor:
    """The whole tensor, which every rank has, as another of its shape is: spread over ranks, or not. No collective."""
    tensor = tensor.to(shared.device)
    if not isinstance(shared, DTensor) or tensor.shape != shared.shape:
        return tensor
    return distribute_tensor(tensor, shared.device_mesh, shared.placements, src_data_rank=None)


def live_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what state_dict has, in its order, as it is now: state_dict would share layers that ranks hold whole."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        tensors = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all ranks where they share it: then every rank has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
