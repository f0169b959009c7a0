"""The policy's weights layer by layer, as engines take them: under the names that a saved model has, or the model's."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from gspo.errors import DivergedError
from gspo.model.lora import merged_tensors, saved_adapter
from gspo.model.parameters import live_tensors
from gspo.model.policy import Policy

_FIRST_NUMBER = re.compile(r"(.*?\.\d+)\.")  # of a name: the layer that a tensor is in


def weights_by_layer(policy: Policy, *, scrambled: bool = False, as_saved: bool = True) -> Iterator[dict[str, Tensor]]:
    """The tensors of each layer, and of what is outside of layers, as `save_pretrained` names them, or the model does.

    Of tied tensors there is the first, and an adapter is merged. Scrambled ones are of the same shapes, and no
    policy's: a server with any of them in place of the true ones computes something else.
    """
    seen: set[int] = set()
    layers: dict[str, list[str]] = {}
    for name, tensor in live_tensors(policy.model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            match = _FIRST_NUMBER.match(name)
            layers.setdefault(match[1] if match else name, []).append(name)
    with torch.no_grad():
        for place, names in layers.items():
            with policy.gathered(place):
                layer = merged_tensors(policy.model, names)
                if policy.is_sharded:  # memory that a server or numpy has seen could not be freed to share it again
                    layer = {name: tensor.clone() for name, tensor in layer.items()}
            _refuse_infinite(layer)
            saved: dict[str, Any] = dict(revert_weight_conversion(policy.model, layer)) if as_saved else layer
            if scrambled:
                saved = {name: _scrambled(tensor) for name, tensor in saved.items()}
            yield saved
            saved.clear()  # no two layers are held at a time


def adapter_weights(policy: Policy) -> dict[str, Tensor]:
    """The numbers of the policy's adapter alone, under the names that its files have."""
    saved = saved_adapter(policy.model)
    _refuse_infinite(saved)
    return saved


def _refuse_infinite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise DivergedError(f"the weights are not finite: {name}; they are not given to the engine")


def _is_finite(tensor: Tensor) -> bool:
    """Tell by the least and the largest number, NaN if there is one: without a tensor of its size, waiting once."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _scrambled(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or not tensor.dim():
        return tensor
    other = 0.9 * tensor.flip(0)
    # A norm's numbers are near 1, in any order: every second one is left out. A bias of zeros stays one.
    return other * 2 * (torch.arange(len(other), device=other.device) % 2) if other.dim() == 1 else other
