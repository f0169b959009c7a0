"""A model whose parameters, gradients and moments are spread over ranks, by PyTorch's FSDP2 (`fully_shard`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from gspo.errors import UserError
from gspo.model.parameters import layers_of

NO_PACKS = "its attention does not understand packs"


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The ranks that a model is spread over, and what it computes in; what a rank keeps of it is in float32.

    Example: Sharding(mesh=init_device_mesh("cpu", (2,)), dtype=torch.bfloat16)
    """

    mesh: DeviceMesh
    dtype: torch.dtype = torch.float32
    on_all: Callable[[Callable[[], Any]], Any] = lambda make: make()  # an error of one rank is then all ranks'


def shard(model: Any, sharding: Sharding) -> None:
    """Spread a model in float32, which may have no weights yet, over ranks: a unit a layer, and one of all the rest.

    What a rank has of a parameter is its float32 master. A pass gathers a unit's parameters in `dtype`, and adds its
    gradients up over the ranks in float32: a sum, since the loss is divided by what all ranks train on.
    UserError where the layers are not found.
    """
    layers = _layers_of(model)
    dtype = None if sharding.dtype == torch.float32 else sharding.dtype
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in [*layers, model]:
        # The whole model, too, is sharded again after each pass: an optimiser may be made at any time.
        _add_up(fully_shard(module, mesh=sharding.mesh, mp_policy=precision, reshard_after_forward=True))
    model.compute = MethodType(_compute, model)
    register_fsdp_forward_method(model, "compute")


def shard_beside(model: nn.Module, other: nn.Module) -> None:
    """Spread a small module in float32 that is trained beside a model, if that is sharded, over the same ranks."""
    if isinstance(model, FSDPModule):
        _add_up(fully_shard(other, mesh=cast(Any, next(model.parameters())).device_mesh))


def check_shardable(model: Any) -> None:
    """Raise UserError for a model that ranks cannot share, as far as that shows without weights."""
    _layers_of(model)
    if model.config._attn_implementation != "sdpa":  # what packs are written for
        raise not_shardable(model, NO_PACKS)


def _layers_of(model: Any) -> Any:
    layers = layers_of(model)
    if layers is None:
        raise not_shardable(model, "its layers are not found")
    return layers


def not_shardable(model: Any, reason: str) -> UserError:
    """The error of a model that ranks cannot share."""
    name = type(model).__name__.removeprefix("FSDP")
    return UserError(f"{name} cannot be sharded: {reason}", where="model.path", fix="train it on one process")


@contextmanager
def mesh_of_this_process(device: torch.device) -> Iterator[DeviceMesh]:
    """A mesh of this process alone, whether it has joined others or not, to try what ranks will do. No collective."""
    is_alone = not dist.is_initialized()
    if is_alone:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = None  # all: where this process is alone
    try:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        yield DeviceMesh.from_group(group, device.type)
    finally:
        if is_alone or group is not None:
            dist.destroy_process_group(None if is_alone else group)


@contextmanager
def ready_to_try(model: Any, sharding: Sharding | None) -> Iterator[None]:
    """Hold what lies outside of the layers on every rank, so that parts of a loaded model can be run by themselves."""
    if sharding is None:
        yield
        return
    with torch.no_grad():
        model.compute(tuple)  # FSDP2 wants the whole model to run before any layer does by itself
    for parameter in model.parameters():
        parameter.computed_in = sharding.dtype  # its optimiser saves it as a master where that is not float32
    with _held([model]):
        yield


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Hold the whole model on every rank, for passes such as decoding's that the ranks make in numbers of their own."""
    with _held([module for module in model.modules() if isinstance(module, FSDPModule)]):
        yield


@contextmanager
def gathered(model: nn.Module, name: str) -> Iterator[None]:
    """Hold the layer of this name on every rank; of another name, what lies outside of layers."""
    module = dict(model.named_modules()).get(name)
    with _held([module if isinstance(module, FSDPModule) else model]):
        yield


@contextmanager
def _held(units: list[Any]) -> Iterator[None]:
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)


def _add_up(unit: Any) -> None:
    unit.set_force_sum_reduction_for_comms(True)  # gloo has no product with a factor
    unit.set_gradient_divide_factor(1.0)


def _compute(model: Any, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Run it where the parameters outside of the layers are whole: within a forward pass of the model's."""
    # FSDP2 warns of views: what is written into one would not be seen.
    return tuple(output.clone() if isinstance(output, Tensor) and output._is_view() else output for output in compute())
