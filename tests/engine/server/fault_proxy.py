"""A proxy in front of a real server, which disturbs single requests and remembers all."""

import http.client
import json
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GENERATE = "/inference/v1/generate"


class Exchange:
    """A request that has come in, for a fault to answer in its own way."""

    def __init__(self, handler: BaseHTTPRequestHandler, url: str, ending: threading.Event) -> None:
        self._handler, self._url, self.ending = handler, urllib.parse.urlsplit(url), ending
        length = int(handler.headers.get("content-length", 0))
        self.path, self.content = handler.path, handler.rfile.read(length)

    @property
    def body(self) -> Any:
        return json.loads(self.content) if self.content else None

    def forward(self, body: Any = None) -> tuple[int, bytes]:
        """The server's own status and answer, to this request or to another body."""
        assert self._url.hostname is not None
        connection = http.client.HTTPConnection(self._url.hostname, self._url.port)
        own = {"authorization", "content-type"}
        headers = {name: value for name, value in self._handler.headers.items() if name.lower() in own}
        content = self.content if body is None else json.dumps(body).encode()
        try:
            connection.request(self._handler.command, self.path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def answer(self, status: int, content: bytes, *, sent: int | None = None) -> None:
        """Answer; with `sent` the connection ends after as many bytes."""
        self._handler.send_response(status)
        self._handler.send_header("content-type", "application/json")
        self._handler.send_header("content-length", str(len(content)))
        self._handler.end_headers()
        self._handler.wfile.write(content[:sent])
        self._handler.close_connection = self._handler.close_connection or sent is not None


Fault = Callable[[Exchange], None]


def hang(exchange: Exchange) -> None:
    """No answer, for as long as the proxy is there."""
    exchange.ending.wait()


def drop(exchange: Exchange) -> None:
    """The connection ends in the middle of the answer."""
    status, content = exchange.forward()
    exchange.answer(status, content, sent=len(content) // 2)


def truncate(exchange: Exchange) -> None:
    """The answer is whole as HTTP has it, and half of its JSON."""
    status, content = exchange.forward()
    exchange.answer(status, content[: len(content) // 2])


def answering(status: int, text: str) -> Fault:
    """This answer, without asking the server."""
    return lambda exchange: exchange.answer(status, text.encode())


def changing(change: Callable[[Any], object]) -> Fault:
    """The server's answer, which `change` changes in its place."""

    def fault(exchange: Exchange) -> None:
        status, content = exchange.forward()
        answer = json.loads(content)
        change(answer)
        exchange.answer(status, json.dumps(answer).encode())

    return fault


def asking(body: Mapping[str, Any]) -> Fault:
    """The server is asked something else."""
    return lambda exchange: exchange.answer(*exchange.forward(body))


@dataclass(kw_only=True)
class Rule:
    """Which requests are disturbed, and how."""

    fault: Fault
    path: str
    times: int
    when: Callable[[Any], bool]


def asks_for_group(body: Any) -> bool:
    """Whether it is no proof's request, which asks for single responses."""
    return bool(body["sampling_params"]["n"] > 1)


@dataclass
class Proxy:
    """Listens on a port of its own; requests are (path, body), in the order in which they came."""

    target: str
    requests: list[tuple[str, Any]] = field(default_factory=list)
    label: str = ""  # of the weights that the server was given last
    rules: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock, self._ending = threading.Lock(), threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._handle(Exchange(self, proxy.target, proxy._ending))

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def disturb(
        self,
        fault: Fault,
        *,
        path: str = GENERATE,
        times: int = 1,
        when: Callable[[Any], bool] = asks_for_group,
    ) -> None:
        """Disturb the next `times` requests of a path."""
        self.rules.append(Rule(fault=fault, path=path, times=times, when=when))

    def groups(self) -> list[tuple[int, ...]]:
        """The prompts of the groups that were asked for."""
        bodies = [body for path, body in self.requests if path == GENERATE]
        return [tuple(body["token_ids"]) for body in bodies if asks_for_group(body)]

    def close(self) -> None:
        """Let go of what hangs, and listen no more."""
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, exchange: Exchange) -> None:
        path, body = exchange.path.split("?")[0], exchange.body
        with self._lock:
            self.requests.append((path, body))
            if path == "/update_weight_version":
                self.label = body["new_version"]
            found = (rule for rule in self.rules if rule.times and rule.path == path and rule.when(body))
            if rule := next(found, None):
                rule.times -= 1
        try:
            if rule:
                rule.fault(exchange)
            else:
                exchange.answer(*exchange.forward())
        except OSError:  # the client has gone, or the server has
            exchange._handler.close_connection = True
