"""The policy's weights on their way to a server: layer by layer, under the names that a saved model has."""

import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from gspo.engine.server.api import NoAnswerError, RefusedError
from gspo.engine.server.server import Server, ServerApi
from gspo.engine.server.vllm import VllmApi
from gspo.model.lora import WEIGHTS, save_adapter_config
from gspo.model.policy import Policy
from gspo.model.weights import adapter_weights, weights_by_layer

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
    """The paths of files, one a layer, that the weights can be read from while they are used."""
    with _new_folder(directory) as (_, write):
        layers = enumerate(weights_by_layer(policy, scrambled=scrambled))
        yield [str(write(f"model-{number:05d}.safetensors", layer)) for number, layer in layers]


@contextmanager
def _new_folder(directory: str | None) -> Iterator[tuple[Path, Callable[[str, Mapping[str, Tensor]], Path]]]:
    """A new folder within the directory, which servers see, too, and what writes tensors to a file of it.

    Without a directory the files are links to this machine's memory for processes of this user: files without a name
    on any disk or in /dev/shm, whose size does not bound them. Those are gone with this process, however that ends.
    """
    if directory is None:
        folder = Path(tempfile.mkdtemp(prefix="gspo-weights-"))
    else:  # of its own, for SGLang loads all files of a directory
        folder = Path(directory, f"weights-{secrets.token_hex(8)}").absolute()
    descriptors: list[int] = []

    def write(name: str, tensors: Mapping[str, Tensor]) -> Path:
        path = folder / name
        if directory is None:
            descriptors.append(os.memfd_create("gspo-weights"))
            path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptors[-1]}")
        with path.open("wb") as file:
            write_safetensors(file, tensors)
        return path

    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder, write
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


class Adapters:
    """The versions of a policy's adapter that servers have, each by a label: a name that is never used again.

    A server goes on with the version that a request names, and may read its files again until it is unloaded.
    """

    def __init__(self, policy: Policy, api: ServerApi, directory: str | None) -> None:
        assert isinstance(api, VllmApi)  # no other takes them
        self._policy, self._api, self._directory = policy, api, directory
        self._kept: dict[str, tuple[ExitStack, Path]] = {}
        self._users: Counter[str] = Counter()  # how many requests under way need each

    @contextmanager
    def ready(self, label: str) -> Iterator[HandOver]:
        """Yield what hands a version to a server; a new label is that of the present numbers."""
        if label not in self._kept:
            with ExitStack() as files:
                folder, write = files.enter_context(_new_folder(self._directory))
                write(WEIGHTS, adapter_weights(self._policy))
                save_adapter_config(self._policy.model, folder)
                self._kept[label] = files.pop_all(), folder

        async def hand_over(server: Server, label: str) -> None:
            if label in server.adapters:  # it has failed since, or when it was given it
                await self._unload(server, label)
            server.adapters[label] = False
            await server.ask(self._api.load(label, self._kept[label][1]), seconds=PUBLISH_SECONDS)
            server.adapters[label] = True

        yield hand_over

    @contextmanager
    def needed(self, label: str) -> Iterator[None]:
        """Keep a version for as long as a request needs it."""
        self._users[label] += 1
        try:
            yield
        finally:
            self._users[label] -= 1

    async def unload_all_but(self, label: str, servers: Sequence[Server]) -> None:
        """Take the other versions from servers, but for those that requests under way need."""
        for old in [name for name in self._kept if name != label and not self._users[name]]:
            for server in servers:
                await self._unload(server, old)
            self._kept.pop(old)[0].close()

    async def _unload(self, server: Server, label: str) -> None:
        if label in server.adapters:
            del server.adapters[label]
            with suppress(NoAnswerError, RefusedError):  # it is seen elsewhere if it is lost
                await server.ask(self._api.unload(label))

    def close(self) -> None:
        """Remove all files."""
        while self._kept:
            self._kept.popitem()[1][0].close()
