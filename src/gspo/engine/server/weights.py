"""The policy's weights on their way to a server: layer by layer, under the names that a saved model has."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from gspo.engine.server.server import Server
from gspo.model.policy import Policy
from gspo.model.weights import weights_by_layer

# Replaces the weights of a server, which samples nothing at this time, by those at hand, and gives them a label.
HandOver = Callable[[Server, str], Awaitable[None]]
PUBLISH_SECONDS = 600.0  # the limit for each of its requests

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}


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
def by_files(policy: Policy, directory: str | None, *, scrambled: bool = False) -> Iterator[HandOver]:
    """Have servers read the weights from files, in memory or in a directory."""
    with weight_files(policy, directory, scrambled=scrambled) as paths:

        async def hand_over(server: Server, label: str) -> None:
            for request in server.api.publish(paths, label):
                await server.ask(request, seconds=PUBLISH_SECONDS)

        yield hand_over


@contextmanager
def weight_files(policy: Policy, directory: str | None = None, *, scrambled: bool = False) -> Iterator[list[str]]:
    """The paths of files, one a layer, that the weights can be read from while they are used.

    They lie in a new folder of the directory, which the servers see, too. Without a directory they are links to this
    machine's memory for processes of this user: files without a name on any disk or in /dev/shm, whose size does not
    bound them. Those are gone with this process, however that ends.
    """
    if directory is None:
        folder = Path(tempfile.mkdtemp(prefix="gspo-weights-"))
    else:  # of its own, for SGLang loads all files of a directory
        folder = Path(directory, f"weights-{secrets.token_hex(8)}").absolute()
    paths: list[Path] = []
    descriptors: list[int] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, layer in enumerate(weights_by_layer(policy, scrambled=scrambled)):
            paths.append(folder / f"model-{number:05d}.safetensors")
            if directory is None:
                descriptors.append(os.memfd_create("gspo-weights"))
                paths[-1].symlink_to(f"/proc/{os.getpid()}/fd/{descriptors[-1]}")
            with paths[-1].open("wb") as file:
                write_safetensors(file, layer)
        yield [str(path) for path in paths]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
