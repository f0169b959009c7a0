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

import httpx
import torch
from torch import Tensor

from gspo.engine.server.api import ServerApi
from gspo.engine.server.server import Server
from gspo.model.policy import Policy
from gspo.model.weights import weights_by_layer

# Replaces the weights of a server, which samples nothing at this time, by those at hand, and gives them a label.
HandOver = Callable[[httpx.AsyncClient, Server, str], Awaitable[None]]
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
def by_files(api: ServerApi, policy: Policy, directory: Path | None = None, **how: bool) -> Iterator[HandOver]:
    """Have servers read the weights from files, in memory or in a directory; `how` is as in weights_by_layer."""
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
