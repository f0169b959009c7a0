"""vLLM's own sender of weights (0.32): what it needs, what it reads, and how it is connected to a server.

It runs in the trainer, and vLLM is imported there for this alone.
"""

import importlib.util
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from gspo.engine.server.process import free_port
from gspo.errors import RunError, UserError
from gspo.model.policy import Policy
from gspo.model.weights import weights_by_layer
from gspo.recipe.sections import ServerConfig

BACKENDS = ("ipc", "nccl")
_CHUNK = 2**28  # bytes that travel at once; a larger tensor travels alone


def check_transfer(name: str, settings: ServerConfig, device: torch.device, *, on_cluster: bool) -> None:
    """Raise UserError where weights cannot get to the engine of this name from a trainer on this device as they should.

    `on_cluster`: it is not the settings that say where servers run, but the section `cluster`.
    """
    way, gpus = settings.weights, {gpu.strip() for entry in settings.devices for gpu in entry.split(",")}
    problems = {
        "vLLM alone takes them so": name != "vllm",
        f"the trainer's device is {device.type}, not a GPU": device.type != "cuda",
        "vLLM is not in the trainer's own environment": importlib.util.find_spec("vllm") is None,
        "they stay within the trainer's GPU, and `devices` names several": way == "ipc" and len(gpus) > 1,
        "they go to other GPUs than the trainer's, and `devices` names none": way == "nccl"
        and not (gpus or settings.urls or on_cluster),
    }
    if problem := next((text for text, is_so in problems.items() if way in BACKENDS and is_so), None):
        fix = "docs/engines.md says what it takes; `weights: memory` needs nothing of it"
        raise UserError(f"weights cannot be handed over by {way}: {problem}", where=f"rollout.{name}.weights", fix=fix)


class Source:
    """The policy's weights as vLLM's sender reads them: what there will be, and then the tensors."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._scrambled = policy, False
        self._turn, self._is_open = threading.Lock(), False
        self._metas: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self.largest = 0  # bytes of a tensor

    def look(self, *, scrambled: bool) -> None:
        """Go through the weights once: those that are not finite are refused before a server waits for them.

        It waits, too, for what this thread has yet to compute of them; the sender reads them on a stream of its own.
        """
        self._scrambled, self._metas, self._is_open = scrambled, [], True
        for layer in weights_by_layer(self._policy):
            self._metas += [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in layer.items()]
            self.largest = max(self.largest, *(tensor.nbytes for tensor in layer.values()))

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of each tensor, in the order of iteration."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(*meta) for meta in self._metas]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        layers = weights_by_layer(self._policy, scrambled=self._scrambled)
        while True:
            with self._turn:
                if not self._is_open:
                    raise RunError("the hand-over of the weights has been given up")
                layer = next(layers, None)
            if layer is None:
                return
            yield from layer.items()

    def close(self) -> None:
        """Have no thread gather weights from now on from other ranks: this one has other things to tell them."""
        with self._turn:
            self._is_open = False


def connect(backend: str, source: Source, client: Any, *, url: str, num_workers: int) -> Any:
    """A sender to the workers of the server at a URL; `client` makes its requests there."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    size = max(_CHUNK, source.largest)
    if backend == "ipc":
        info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
    else:
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=_own_address(url),
            master_port=free_port(),
            world_size=1 + num_workers,
            packed_buffer_size_bytes=size,
            packed_num_buffers=1,  # all is computed, packed and sent on one stream: nothing overtakes
        )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _own_address(url: str) -> str:
    """The address of this machine, as the server at that URL sees it."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as connection:
        address: str = connection.getsockname()[0]
    return address
