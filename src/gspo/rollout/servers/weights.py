"""The policy's weights on their way to a server: layer by layer, under the names that a saved model has."""

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from gspo.errors import DivergedError
from gspo.model.parameters import live_tensors
from gspo.model.policy import Policy
from gspo.rollout.servers.api import ServerApi
from gspo.rollout.servers.server import Server

# Replaces the weights of a server, which samples nothing at this time, by those at hand, and gives them a label.
HandOver = Callable[[httpx.AsyncClient, Server, str], Awaitable[None]]
PUBLISH_SECONDS = 600.0  # the limit for each of its requests

_FIRST_NUMBER = re.compile(r"(.*?\.\d+)\.")  # of a name: the layer that a tensor is in
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}


def weights_by_layer(policy: Policy, *, scrambled: bool = False, as_saved: bool = True) -> Iterator[dict[str, Tensor]]:
    """The tensors of each layer, and of what is outside of layers, as `save_pretrained` names them, or the model does.

    Of tied tensors there is the first. Scrambled ones are of the same shapes, and no policy's: a server with any of
    them in place of the true ones computes something else.
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
                layer = {name: _tensor(policy.model, name) for name in names}
                if policy.is_sharded:  # memory that a server or numpy has seen could not be freed to share it again
                    layer = {name: tensor.clone() for name, tensor in layer.items()}
            for name, tensor in layer.items():
                if not _is_finite(tensor):
                    raise DivergedError(f"the weights are not finite: {name}; they are not given to the engine")
            saved: dict[str, Any] = dict(revert_weight_conversion(policy.model, layer)) if as_saved else layer
            if scrambled:
                saved = {name: _scrambled(tensor) for name, tensor in saved.items()}
            yield saved
            saved.clear()  # no two layers are held at a time


def _tensor(model: Any, name: str) -> Tensor:
    module, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(module), leaf)
    return tensor.detach()


def _is_finite(tensor: Tensor) -> bool:
    """By its least and largest number, NaN if there is one: without a tensor of its size beside it."""
    return not tensor.numel() or all(bound.isfinite() for bound in torch.aminmax(tensor))


def _scrambled(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or not tensor.dim():
        return tensor
    other = 0.9 * tensor.flip(0)
    # A norm's numbers are near 1, in any order: every second one is left out. A bias of zeros stays one.
    return other * 2 * (torch.arange(len(other), device=other.device) % 2) if other.dim() == 1 else other


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write a file that safetensors reads, tensor by tensor: its own writer first makes a copy of them all."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


@contextmanager
def by_files(api: ServerApi, policy: Policy, directory: Path | None = None, **how: bool) -> Iterator[HandOver]:
    """Has servers read the weights from files, in memory or in a directory; `how` is as in weights_by_layer."""
    with in_directory(policy, directory, **how) if directory else in_memory(policy, **how) as paths:

        async def hand_over(client: httpx.AsyncClient, server: Server, label: str) -> None:
            for request in api.publish(paths, label):
                await server.ask(client, request, seconds=PUBLISH_SECONDS)

        yield hand_over


@contextmanager
def in_memory(policy: Policy, **how: bool) -> Iterator[list[str]]:
    """Paths that another process of this user can read the weights from, in this machine's memory, while they are used.

    A file a layer, none of which has a name on any disk or in /dev/shm, whose size does not bound them: they are gone
    with this process, however that ends.
    """
    files: list[BinaryIO] = []
    links: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="gspo-weights-") as folder:
        try:
            for number, layer in enumerate(weights_by_layer(policy, **how)):
                files.append(os.fdopen(os.memfd_create("gspo-weights"), "wb"))
                write_safetensors(files[-1], layer)
                files[-1].flush()
                links.append(Path(folder) / f"model-{number:05d}.safetensors")
                links[-1].symlink_to(f"/proc/{os.getpid()}/fd/{files[-1].fileno()}")
            yield [str(link) for link in links]
        finally:
            for file in files:
                file.close()


@contextmanager
def in_directory(policy: Policy, directory: Path, **how: bool) -> Iterator[list[str]]:
    """Paths of files in a directory that the servers see, too, for as long as needed."""
    folder = (directory / f"weights-{secrets.token_hex(8)}").absolute()  # SGLang loads all files of a directory
    paths: list[Path] = []
    try:
        folder.mkdir(parents=True)
        for number, layer in enumerate(weights_by_layer(policy, **how)):
            paths.append(folder / f"model-{number:05d}.safetensors")
            with paths[-1].open("wb") as file:
                write_safetensors(file, layer)
        yield [str(path) for path in paths]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
