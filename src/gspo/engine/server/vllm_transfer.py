"""Weights handed from GPU to GPU by vLLM's own transfer: CUDA IPC within a GPU, NCCL from the trainer's to others.

vLLM's sender (0.32) runs in the trainer, and vLLM is imported there for this alone.
"""

import asyncio
import base64
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from gspo.engine.server.api import NoAnswerError, RefusedError, Request
from gspo.engine.server.hosts import free_port
from gspo.engine.server.server import Server
from gspo.engine.server.vllm import VllmApi
from gspo.engine.server.weights import PUBLISH_SECONDS, HandOver
from gspo.errors import RunError
from gspo.loop import in_thread
from gspo.model.policy import Policy
from gspo.model.weights import weights_by_layer

_CHUNK = 2**28  # bytes that travel at once; a larger tensor travels alone


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


class Client:
    """The requests that vLLM's sender makes of one server, from threads of its own."""

    post: Callable[[str, Any], None]  # of the present hand-over
    label = ""  # of the weights that are handed over, or were last
    sender: Any = None  # vLLM's, once the two are connected

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = {key: value for key, value in update_info.items() if not key.startswith("ipc_handles")}
        if "ipc_handles" in update_info:  # they have no JSON, and the server unpickles them
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()
        self.post("/update_weights", {"update_info": info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("/finish_weight_update", {"weight_version": weight_version or self.label})


class Transfer:
    """A sender of weights to one server after the other, each in its own group: one that fails takes no other along."""

    def __init__(self, policy: Policy, backend: str) -> None:
        self._policy, self._backend, self._source = policy, backend, Source(policy)
        self._clients: dict[str, Client] = {}  # by the server's address
        self._turn = threading.Lock()

    @contextmanager
    def ready(self, *, scrambled: bool = False) -> Iterator[HandOver]:
        """Yield what hands the present weights, or scrambled ones, to a server."""
        self._source.look(scrambled=scrambled)
        try:
            yield self._hand_over
        finally:
            self._source.close()

    async def _hand_over(self, server: Server, label: str) -> None:
        loop, done, url, api = asyncio.get_running_loop(), Future[None](), server.url, server.api
        assert isinstance(api, VllmApi)  # no other takes them so

        async def ask(path: str, body: Any = None) -> Any:
            return await server.ask(Request(path=path, body=body), seconds=PUBLISH_SECONDS)

        def post(path: str, body: Any) -> None:
            if done.done():  # it has failed, or nobody waits for it any longer
                raise RunError("the hand-over is given up")
            asked = ask(path, body)
            try:
                asyncio.run_coroutine_threadsafe(asked, loop).result()
            except BaseException as error:
                asked.close()  # the loop may have ended, and never have run it
                _settle(done, error)  # at once: the sender waits forever for a server that has failed
                raise

        client = self._clients.pop(url, None)
        if client is None or client.label != (await ask("/weight_info"))["weight_version"]:
            client = Client()  # the server has been started anew, whoever did that
        client.post, client.label = post, label
        num_workers = (await ask("/get_world_size"))["world_size"]
        await server.ask(api.pause, seconds=PUBLISH_SECONDS)
        in_thread("hand-over", self._send, client, url, num_workers, done)
        await asyncio.wrap_future(done)
        await server.ask(api.forget, seconds=PUBLISH_SECONDS)
        await ask("/resume", {})
        self._clients[url] = client

    def _send(self, client: Client, url: str, num_workers: int, done: Future[None]) -> None:
        try:
            with self._turn, torch.accelerator.device_index(self._policy.device.index):
                client.sender = client.sender or connect(
                    self._backend, self._source, client, url=url, num_workers=num_workers
                )
                client.sender.send_weights()
            _settle(done, None)
        except (RunError, NoAnswerError, RefusedError) as error:
            _settle(done, error)
        except Exception as error:  # of vLLM, NCCL or CUDA
            _settle(done, NoAnswerError(f"{self._backend}: {type(error).__name__}: {error}"))


def _settle(done: Future[None], error: BaseException | None) -> None:
    with suppress(InvalidStateError):  # it is settled, or nobody waits any longer
        done.set_exception(error)
