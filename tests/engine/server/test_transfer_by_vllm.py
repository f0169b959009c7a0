"""Weights from GPU to GPU by vLLM's own classes and routes, with memory of the CPU where theirs is a GPU's.

What stands in for NCCL and CUDA is here: a queue, a table of buffers, streams that do nothing. All else is vLLM's: both
ends of the transfer, what packs and unpacks, the forms of the messages, and the server's routes.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo import loop
from gspo.engine.server import vllm_transfer
from gspo.engine.server.api import NoAnswerError
from gspo.engine.server.hosts import free_port
from gspo.engine.server.server import Server, new_client
from gspo.engine.server.vllm import VllmApi
from gspo.engine.server.vllm_transfer import Source, Transfer
from gspo.model.weights import weights_by_layer
from gspo.recipe.sections import ServerConfig

_PLACE = "vllm.distributed.weight_transfer"
base, factory, nccl_common, packed_tensor, routes, cache_routes, fastapi, uvicorn = (
    pytest.importorskip(name, reason="vLLM is not in this environment", exc_type=ImportError)
    for name in (
        *(f"{_PLACE}.{name}" for name in ("base", "factory", "nccl_common", "packed_tensor")),
        "vllm.entrypoints.rl.online.api_router",
        "vllm.entrypoints.serve.dev.cache.api_router",
        "fastapi",
        "uvicorn",
    )
)
BACKENDS = ["nccl", "ipc"]


class Model(torch.nn.Module):
    """Keeps what it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, weights: Any) -> None:
        self.loaded += [(name, tensor.clone()) for name, tensor in weights]


class Engine:
    """vLLM's engine as its routes see it, with a worker's end of the transfer: what gpu_worker.py does with it."""

    def __init__(self, backend: str) -> None:
        self.model, self.label, self.log = Model(), "default", list[str]()
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0, world_size_across_dp=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=None)
        self.worker = factory.WeightTransferEngineFactory.create_engine(
            SimpleNamespace(backend=backend), self.vllm_config, torch.device("cpu"), self.model
        )

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.log.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.log.append("resume")

    async def reset_prefix_cache(self, *_: Any) -> bool:
        self.log.append("reset")
        return True

    async def init_weight_transfer_engine(self, request: Any) -> None:
        info = self.worker.parse_init_info(request.init_info)
        await asyncio.to_thread(self.worker.init_transfer_engine, info)

    async def start_weight_update(self) -> None:
        self.model.loaded = []
        self.worker.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self.worker.update_weights, request.update_info)

    async def finish_weight_update(self, weight_version: str | None) -> None:
        self.worker.finish_weight_update()
        self.label = weight_version or self.label

    async def get_weight_version(self) -> str:
        return self.label


class Group:
    """A broadcast from rank 0 to rank 1, in place of NCCL's."""

    def __init__(self, channel: "queue.Queue[torch.Tensor]", rank: int) -> None:
        self.channel, self.rank = channel, rank

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        if self.rank == 0:
            self.channel.put(tensor.clone())
        else:
            sent = self.channel.get(timeout=10)
            assert sent.shape == tensor.shape
            tensor.copy_(sent)


@pytest.fixture(autouse=True)
def gpu_of_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of CUDA and NCCL the two ends use; a small buffer, so that weights travel in several parts."""
    channels: dict[int, queue.Queue[torch.Tensor]] = {}
    buffers: list[torch.Tensor] = []
    empty = torch.empty

    def on_cpu(*sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return empty(*sizes, **options)

    def group(master_address: str, master_port: int, rank: int, world_size: int, device: Any) -> Group:
        assert (master_address, world_size) == ("127.0.0.1", 2)
        return Group(channels.setdefault(master_port, queue.Queue()), rank)

    def export(buffer: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        buffers.append(buffer)
        return None, (len(buffers) - 1, torch.Tensor, buffer.shape, torch.uint8, b"handle", 0, 0)

    stream = SimpleNamespace(synchronize=lambda: None)
    for place, name, stand_in in [
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "synchronize", lambda: None),
        (torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-of-the-trainer")),
        (torch.cuda, "current_stream", lambda: stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "ipc_collect", lambda: None),
        (torch, "empty", on_cpu),
        (torch.multiprocessing.reductions, "rebuild_cuda_tensor", lambda number, *_: buffers[number]),
        (packed_tensor, "reduce_tensor", export),
        (packed_tensor, "_get_streams", lambda _, number: (stream,) * number),
        (nccl_common, "stateless_init_process_group", group),
        (vllm_transfer, "_CHUNK", 2_000),
    ]:
        monkeypatch.setattr(place, name, stand_in)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


@pytest.fixture
def serve() -> Iterator[Callable[[Engine], Server]]:
    """Serves an engine on vLLM's routes."""
    running: list[tuple[Any, threading.Thread]] = []

    def start(engine: Engine) -> Server:
        app, port = fastapi.FastAPI(), free_port()
        app.state.engine_client = engine
        app.include_router(routes.router)
        app.include_router(cache_routes.router)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
        running.append((server, threading.Thread(target=server.run)))
        running[-1][1].start()
        while not server.started:
            threading.Event().wait(0.01)
        api = VllmApi(ServerConfig(), max_rows=1, returns_experts=False)
        return Server(name="it", api=api, client=new_client(), url=f"http://127.0.0.1:{port}", key="key")

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


def hand_over(transfer: Transfer, servers: list[Server], label: str, *, scrambled: bool = False) -> None:
    async def work() -> None:
        await asyncio.gather(*(own(server, label) for server in servers))

    with transfer.ready(scrambled=scrambled) as own:
        loop.run(work())


def assert_has(engine: Engine, policy: Any, label: str, *, scrambled: bool = False) -> None:
    expected = {name: t for layer in weights_by_layer(policy, scrambled=scrambled) for name, t in layer.items()}
    assert [name for name, _ in engine.model.loaded] == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.model.loaded)
    assert engine.label == label


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_servers_get_the_weights_under_their_names_bit_for_bit(
    backend: str, family: str, new_policy: Any, serve: Any
) -> None:
    """Scrambled, as they are, and as they are a step later; in parts, and a tensor that no part holds."""
    policy, engines = new_policy(family, "bfloat16", tie_word_embeddings=True), [Engine(backend), Engine(backend)]
    servers, transfer = [serve(engine) for engine in engines], Transfer(policy, backend)
    assert sum(p.nbytes for p in policy.model.parameters()) > 2 * vllm_transfer._CHUNK
    for label, scrambled in (("scrambled", True), ("a-0", False), ("a-1", False)):
        hand_over(transfer, servers, label, scrambled=scrambled)
        for engine in engines:
            assert_has(engine, policy, label, scrambled=scrambled)
            assert engine.log == ["pause keep", "reset", "resume"]
            engine.log.clear()
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.5)


def test_a_server_that_refuses_pickles_says_so(new_policy: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION")
    with pytest.raises(NoAnswerError, match="/update_weights: status 500"):
        hand_over(Transfer(new_policy(), "ipc"), [serve(Engine("ipc"))], "a-0")


def test_a_server_of_another_backend_ends_the_hand_over(new_policy: Any, serve: Any) -> None:
    with pytest.raises(NoAnswerError, match="/init_weight_transfer_engine: status 500"):
        hand_over(Transfer(new_policy(), "nccl"), [serve(Engine("ipc"))], "a-0")


def test_the_source_is_what_vllm_takes_a_source_for(each_family: str, new_policy: Any) -> None:
    """Its groups, too, which NCCL and IPC do not ask for: a layer each, in the order of iteration."""
    policy = new_policy(each_family)
    source = type("Checked", (Source, base.WeightSource), {})(policy)
    source.look(scrambled=False)
    batches = list(source.iter_groups())
    metas = source.metadata()
    assert [name for names, _ in batches for name in names] == [meta.name for meta in metas]
    pairs = zip(metas, (tensor for _, tensors in batches for tensor in tensors), strict=True)
    assert all((meta.dtype, meta.shape) == (tensor.dtype, tuple(tensor.shape)) for meta, tensor in pairs)
