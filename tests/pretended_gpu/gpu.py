"""Tensors that claim to lie on cuda:0 and hold real values: each operator runs on the CPU, once its devices agree.

Not seen so: what a kernel itself refuses, streams, NCCL and memory.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import gspo

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
_GSPO = str(Path(gspo.__file__).parent) + "/"
# The host waits for the GPU in these: the size of what they return is in the values, or is the values.
_WAITING = {
    *(_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default, _aten.nonzero.default),
    *(_aten.masked_select.default, _aten._unique2.default, _aten.unique_dim.default, _aten.bincount.default),
    _aten.unique_consecutive.default,
}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_COPYING = {_aten._to_copy.default: 0, _aten.copy_.default: 1}  # which argument is copied

waits: Counter[str] = Counter()  # by the line of gspo that waits
copies: Counter[str] = Counter()  # to the GPU that need not have been, by line


class WrongDeviceError(RuntimeError):
    """An operator was given tensors of both devices."""


class _OnGpu(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_OnGpu":
        layout: dict[str, Any] = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made: _OnGpu = Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=CUDA, **layout)
        made.held = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"a tensor of {self.dtype} and sizes {list(self.shape)} on {CUDA}"

    def tolist(self) -> Any:
        waits[_place()] += 1
        return self.held.tolist()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def storage(self) -> Any:
        return self.held.storage()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self} can't be converted to numpy")

    @classmethod
    def __torch_dispatch__(cls, operator: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        return _run(operator, arguments, named or {})


class PretendedGpu(TorchDispatchMode):
    """A block in which what is made on "cuda" is such a tensor."""

    def __enter__(self) -> Any:
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._before)
        super().__exit__(*error)

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        return _run(operator, arguments, named or {})


def install() -> None:
    """Have this process pretend, in every thread that it starts from now on."""
    plain_to, plain_empty, plain_run = nn.Module.to, nn.Module.to_empty, threading.Thread.run

    def to(module: nn.Module, *arguments: Any, **named: Any) -> nn.Module:
        device = named.get("device", arguments[0] if arguments else None)
        is_device = isinstance(device, str | torch.device) and torch.device(device).type == "cuda"
        return _moved(module) if is_device else plain_to(module, *arguments, **named)

    def to_empty(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        return plain_empty(module, device="cpu", recurse=recurse).to(device)

    def run(thread: threading.Thread) -> None:
        with PretendedGpu():
            plain_run(thread)

    def inference_mode(mode: bool = True) -> Any:  # in which views of such tensors fail
        return torch.no_grad() if mode else torch.enable_grad()

    for place, changes in {
        torch: {"inference_mode": inference_mode},
        nn.Module: {"to": to, "to_empty": to_empty},
        threading.Thread: {"run": run},
        torch.cuda: {
            "_lazy_init": lambda: None,
            "set_device": lambda _: None,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_name": lambda *_: "a pretended GPU",
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda *_: None,
        },
    }.items():
        for name, change in changes.items():  # type: ignore[attr-defined]
            setattr(place, name, change)


def _moved(module: nn.Module) -> nn.Module:
    """The module on the GPU, its ties kept: `Module.to` sets `.data`, which would lose the class of the tensors."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, own in table.items():
                if own is not None and id(own) not in made:
                    new = own.detach().to(CUDA)
                    is_parameter = isinstance(own, nn.Parameter)
                    made[id(own)] = nn.Parameter(new, own.requires_grad) if is_parameter else new
                if own is not None:
                    table[name] = made[id(own)]  # type: ignore[assignment]
    return module


def _run(operator: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Run an operator on the CPU, as it would run on the device of its tensors."""
    if operator is _aten._fused_sdp_choice.default:
        return 0
    tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
    num_on_gpu = sum(isinstance(tensor, _OnGpu) for tensor in tensors)
    device = named.get("device")
    is_gpu = torch.device(device).type == "cuda" if device is not None else num_on_gpu > 0
    if operator in _COPYING:
        is_gpu = _copied(operator, arguments, named, is_gpu)
    elif num_on_gpu:
        _check(operator, arguments, named, tensors)
    out = _on_cpu(operator)(*tree_map(_inner, arguments), **tree_map(_inner, _cpu_options(named)))
    if operator is _aten._local_scalar_dense.default or not is_gpu:
        return out
    out = tree_map(lambda leaf: _OnGpu(leaf) if isinstance(leaf, Tensor) else leaf, out)
    return return_and_correct_aliasing(operator, tuple(arguments), dict(named), out) if num_on_gpu else out


def _copied(operator: Any, arguments: Sequence[Any], named: Mapping[str, Any], is_gpu: bool) -> bool:
    """Count a copy that makes the host wait; return whether it goes to the GPU."""
    source = isinstance(arguments[_COPYING[operator]], _OnGpu)
    target = isinstance(arguments[0], _OnGpu) if operator is _aten.copy_.default else is_gpu
    is_waited_for = not (named.get("non_blocking") or (operator is _aten.copy_.default and arguments[2:3] == (True,)))
    if source != target and (source or is_waited_for):
        (waits if source else copies)[_place()] += 1
    return target


def _check(operator: Any, arguments: Sequence[Any], named: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Refuse tensors of both devices, as kernels do, and count an operator that makes the host wait."""
    is_index = operator in _INDEXING and isinstance(arguments[0], _OnGpu)
    on_cpu = [list(tensor.shape) for tensor in tensors if _is_apart(tensor)]
    has_cpu_values = is_index and any(isinstance(own, Tensor) and _is_apart(own) for own in arguments[2:])
    if on_cpu and (not is_index or has_cpu_values):
        raise WrongDeviceError(f"{operator} has tensors of {CUDA} and, of sizes {on_cpu}, of the CPU: {_place()}")
    indices = [index for index in arguments[1] if index is not None] if is_index else []
    by_mask = any(index.dtype == torch.bool for index in indices)
    of_unknown_size = operator is _aten.repeat_interleave.Tensor and named.get("output_size") is None
    if operator in _WAITING or by_mask or of_unknown_size:
        waits[_place()] += 1
    elif on_cpu:
        copies[_place()] += 1


def _is_apart(tensor: Tensor) -> bool:
    return not isinstance(tensor, _OnGpu) and tensor.dim() > 0


def _on_cpu(operator: Any) -> Callable[..., Any]:
    """What computes it: CUDA has a product with another dtype, and counts integers, which no CPU has."""
    if operator is _aten.mm.dtype:
        return lambda left, right, dtype: left.to(dtype) @ right.to(dtype)
    if operator is _aten.histc.default:
        return lambda values, *rest: torch.histc(values.float(), *rest).to(values.dtype)
    return operator


def _cpu_options(named: Mapping[str, Any]) -> dict[str, Any]:
    changed = {"device": torch.device("cpu"), "pin_memory": False}
    return {**named, **{name: value for name, value in changed.items() if named.get(name)}}


def _inner(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, _OnGpu) else leaf


def _place() -> str:
    """The line of gspo that is under way, or else of a package."""
    frame: FrameType | None = sys._getframe(1)
    found = "no line of Python's"  # of autograd's own
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_GSPO):
            return f"{name.removeprefix(_GSPO)}:{frame.f_lineno}"
        if found.startswith("no ") and ("/transformers/" in name or "/torch/optim" in name):
            found = f"{name.rpartition('/site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return found
