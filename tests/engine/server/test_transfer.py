"""Weights from GPU to GPU, without vLLM: what a server is asked for by a sender that makes the calls of vLLM's."""

import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any, ClassVar

import httpx
import pytest
import torch

from gspo import loop
from gspo.engine import make
from gspo.engine.make import check_transfer
from gspo.engine.server import vllm_transfer
from gspo.engine.server.api import NoAnswerError
from gspo.engine.server.server import Server, new_client
from gspo.engine.server.vllm import VllmApi
from gspo.engine.server.vllm_transfer import Source, Transfer
from gspo.errors import DivergedError, RunError, UserError
from gspo.model.weights import weights_by_layer
from gspo.recipe.sections import ServerConfig

AROUND = ["/pause?mode=keep", "/reset_prefix_cache", "/resume"]
CONNECT, UPDATE = "/init_weight_transfer_engine", ["/start_weight_update", "/update_weights", "/finish_weight_update"]


class FakeServer(ThreadingHTTPServer):
    """Answers as vLLM's server does, and notes what it was asked for with the key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posts: list[tuple[str, Any]] = []
        self.label = "default"
        self.fails_at = ""

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.posts]

    @property
    def as_server(self) -> Server:
        api = VllmApi(ServerConfig(), max_rows=1, returns_experts=False)
        url = f"http://127.0.0.1:{self.server_port}"
        return Server(name="it", api=api, client=client(), url=url, key="key")


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._answer({"/weight_info": {"weight_version": self.server.label}, "/get_world_size": {"world_size": 2}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] == "Bearer key":
            self.server.posts.append((self.path, body))
        if self.path == "/finish_weight_update":
            self.server.label = body["weight_version"]
        self._answer({self.path: {}} if self.path != self.server.fails_at else {})

    def _answer(self, answers: dict[str, Any]) -> None:
        text = json.dumps(answers.get(self.path)).encode()
        self.send_response(200 if self.path in answers else 500)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class FakeSender:
    """Makes the calls of vLLM's senders in their order; what an update tells is the sum of each tensor."""

    go_on = threading.Event()
    threads: ClassVar[list[threading.Thread]] = []

    def __init__(self, backend: str, source: Any, client: Any, *, url: str, num_workers: int) -> None:
        self.source, self.client = source, client
        client.init_weight_transfer_engine({"world_size": 1 + num_workers})

    def send_weights(self) -> None:
        self.threads.append(threading.current_thread())
        self.client.start_weight_update()
        sums = {name: float(tensor.double().sum()) for name, tensor in self.source}
        try:
            self.client.update_weights(sums)
        except NoAnswerError:
            self.go_on.wait(60)  # as NCCL waits for a server that will never come
        self.client.finish_weight_update()


@pytest.fixture
def servers() -> Iterator[Callable[[], FakeServer]]:
    started: list[FakeServer] = []

    def start() -> FakeServer:
        started.append(FakeServer())
        threading.Thread(target=started[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def fake_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_transfer, "connect", FakeSender)
    monkeypatch.setattr(FakeSender, "go_on", threading.Event())


@cache
def client() -> httpx.AsyncClient:
    """One for all hand-overs, as a run has it."""
    return new_client()


def hand_over(transfer: Transfer, server: FakeServer, label: str, *, scrambled: bool = False) -> None:
    async def work() -> None:
        await own(server.as_server, label)

    with transfer.ready(scrambled=scrambled) as own:
        loop.run(work())


def sums(policy: Any, **options: Any) -> dict[str, float]:
    layers = weights_by_layer(policy, **options)
    return {name: float(tensor.double().sum()) for layer in layers for name, tensor in layer.items()}


def test_a_server_is_paused_connected_given_the_weights_and_the_label(new_policy: Any, servers: Any) -> None:
    """All with the key; it is told to forget what it has computed with others before it goes on."""
    policy, server = new_policy("qwen3_moe"), servers()
    hand_over(Transfer(policy, "nccl"), server, "a-1")
    assert server.paths == [AROUND[0], CONNECT, *UPDATE, *AROUND[1:]]
    asked = dict(server.posts)
    assert asked[CONNECT] == {"init_info": {"world_size": 3}}
    assert asked["/update_weights"] == {"update_info": sums(policy)}
    assert asked["/finish_weight_update"] == {"weight_version": "a-1"}


def test_scrambled_weights_go_the_same_way_and_are_others(new_policy: Any, servers: Any) -> None:
    policy, server = new_policy(), servers()
    transfer = Transfer(policy, "ipc")
    hand_over(transfer, server, "scrambled", scrambled=True)
    hand_over(transfer, server, "a-1")
    first, second = (body["update_info"] for path, body in server.posts if path == "/update_weights")
    assert first == sums(policy, scrambled=True) != second == sums(policy)


def test_a_connection_is_kept_until_the_server_has_other_weights_than_were_handed_over(
    new_policy: Any, servers: Any
) -> None:
    """One that was started anew, whoever did that, says so by the label of its weights, and is connected again."""
    transfer, server, other = Transfer(new_policy(), "nccl"), servers(), servers()
    for own in (server, other, server, other):
        hand_over(transfer, own, f"a-{len(own.posts)}")
    assert server.paths.count(CONNECT) == other.paths.count(CONNECT) == 1
    server.label = "default"
    for own in (server, other, server):
        hand_over(transfer, own, f"b-{len(own.posts)}")
    assert server.paths.count(CONNECT) == 2
    assert other.paths.count(CONNECT) == 1


@pytest.mark.parametrize("path", [CONNECT, "/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_server_that_fails_ends_the_hand_over_at_once(path: str, new_policy: Any, servers: Any) -> None:
    """Though the sender waits on."""
    transfer, server = Transfer(new_policy(), "nccl"), servers()
    server.fails_at = path
    with pytest.raises(NoAnswerError, match=f"{path}: status 500"):
        hand_over(transfer, server, "a-1")
    assert "/resume" not in server.paths


def test_what_a_sender_does_later_for_a_hand_over_that_has_failed_reaches_no_server(
    new_policy: Any, servers: Any
) -> None:
    transfer, server = Transfer(new_policy(), "nccl"), servers()
    server.fails_at = "/update_weights"
    with pytest.raises(NoAnswerError):
        hand_over(transfer, server, "a-1")
    FakeSender.go_on.set()
    FakeSender.threads[-1].join(10)
    assert server.paths[-1] == "/update_weights" and server.label == "default"


def test_what_goes_wrong_in_the_sender_is_told_in_its_words(
    new_policy: Any, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("NCCL error: invalid usage")

    monkeypatch.setattr(vllm_transfer, "connect", fail)
    with pytest.raises(NoAnswerError, match="nccl: RuntimeError: NCCL error: invalid usage"):
        hand_over(Transfer(new_policy(), "nccl"), servers(), "a-1")


def test_weights_that_are_not_finite_are_refused_before_a_server_is_asked_for_anything(
    new_policy: Any, servers: Any
) -> None:
    policy, server = new_policy(), servers()
    with torch.no_grad():
        policy.model.model.layers[1].mlp.up_proj.weight[3, 2] = torch.inf
    with pytest.raises(DivergedError, match=r"layers\.1\.mlp\.up_proj"):
        hand_over(Transfer(policy, "nccl"), server, "a-1")
    assert not server.posts


@pytest.mark.parametrize(
    ("name", "device", "has_vllm", "settings", "problem"),
    [
        ("vllm", "cuda", False, {"weights": "nccl", "devices": ["1"]}, "not in the trainer's own environment"),
        ("vllm", "cpu", True, {"weights": "ipc"}, "the trainer's device is cpu"),
        ("vllm", "cuda", True, {"weights": "nccl"}, "`devices` names none"),
        ("vllm", "cuda", True, {"weights": "ipc", "devices": ["0", "1"]}, "`devices` names several"),
        ("vllm", "cuda", True, {"weights": "ipc", "devices": ["0,1"]}, "`devices` names several"),
        ("sglang", "cuda", True, {"weights": "ipc"}, "vLLM alone"),
        ("vllm", "cuda", True, {"weights": "nccl", "devices": ["1", "2,3"]}, None),
        ("vllm", "cuda", True, {"weights": "nccl", "urls": ["http://node7:8000"]}, None),
        ("vllm", "cuda", True, {"weights": "ipc"}, None),
        ("vllm", "cpu", False, {"weights": "memory"}, None),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    name: str,
    device: str,
    has_vllm: bool,
    settings: dict[str, Any],
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(make.importlib.util, "find_spec", lambda _: object() if has_vllm else None)
    config = ServerConfig.model_validate(settings)
    if problem is None:
        check_transfer(name, config, torch.device(device), on_cluster=False)
        return
    with pytest.raises(UserError, match=problem) as raised:
        check_transfer(name, config, torch.device(device), on_cluster=False)
    assert raised.value.where == f"rollout.{name}.weights"


def test_once_it_is_given_up_no_thread_gathers_another_layer(new_policy: Any) -> None:
    """Where ranks share the model, that would be a call to all of them, between others."""
    policy = new_policy("qwen3")
    source, names = Source(policy), list(next(weights_by_layer(policy)))
    source.look(scrambled=False)
    tensors = iter(source)
    assert next(tensors)[0] == names[0]
    source.close()
    assert [name for name, _ in islice(tensors, len(names) - 1)] == names[1:]
    with pytest.raises(RunError, match="given up"):
        next(tensors)
