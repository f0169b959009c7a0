"""A policy whose parameters, gradients and moments are spread over ranks, by PyTorch's FSDP2 (`fully_shard`)."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.ranks import num_ranks


def shard(policy: Policy, mesh: DeviceMesh, *, dtype: torch.dtype = torch.float32) -> Policy:
    """Spread the model, which is in float32, over the ranks of the mesh: a unit a layer, and one of all the rest.

    What a rank has of a parameter is its float32 master. A pass gathers a unit's parameters in `dtype`, and adds its
    gradients up over the ranks in float32: a sum, since the loss is divided by what all ranks train on.
    UserError as `layers_of` has it.
    """
    model, layers = policy.model, layers_of(policy)
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for module in (*layers, model):
        # The whole model, too, is sharded again after each pass: an optimiser may be made at any time.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # neither of these reaches the modules within
            module.set_force_sum_reduction_for_comms(True)  # gloo has no product with a factor
            module.set_gradient_divide_factor(1.0)
    model.compute = MethodType(_compute, model)
    register_fsdp_forward_method(model, "compute")
    with torch.no_grad():
        model.compute(tuple)  # FSDP2 wants the whole model to run before any layer does by itself
    for parameter in model.parameters():
        parameter.computed_in = dtype  # its optimiser saves it as a master where that is not float32
    return replace(policy, sharded_dtype=dtype)


def mesh_of(sharding: str, device: torch.device) -> DeviceMesh:
    """All ranks as `trainer.sharding` has it: `full`, `hybrid` (each host has all shards) or `none` (copies)."""
    size = num_ranks()
    if sharding == "full":
        return init_device_mesh(device.type, (size,))
    within = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if sharding == "hybrid" else 1
    return init_device_mesh(device.type, (size // within, within), mesh_dim_names=("copies", "shards"))


def shard_beside(policy: Policy, module: nn.Module) -> None:
    """Spread a small module in float32 that is trained beside the policy, if that is sharded, over the same ranks."""
    if policy.is_sharded:
        unit = fully_shard(module, mesh=next(policy.model.parameters()).device_mesh)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)


def layers_of(policy: Policy) -> Any:
    """The layers of a model that can be sharded.

    UserError where they are not found, or where the attention does not understand packs: ranks would then run the trunk
    in different numbers.
    """
    layers = getattr(policy.trunk, "layers", getattr(policy.trunk, "h", None))
    if layers is None or not policy.supports_packing:
        reason = "its layers are not found" if layers is None else "its attention does not understand packs"
        what = f"{type(policy.model).__name__} cannot be sharded: {reason}"
        raise UserError(what, where="model.path", fix="train it on one process")
    return layers


@contextmanager
def unsharded(policy: Policy) -> Iterator[None]:
    """Hold the whole model on every rank, for passes such as decoding's that the ranks make in numbers of their own."""
    units = [module for module in policy.model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)


def _compute(model: Any, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Run it where the parameters outside of the layers are whole: within a forward pass of the model's."""
    # FSDP2 warns of views: what is written into one would not be seen.
    return tuple(own.clone() if isinstance(own, Tensor) and own._is_view() else own for own in compute())
