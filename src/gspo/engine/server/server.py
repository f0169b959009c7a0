"""A server: where it listens and, where this run has started it, its process."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from gspo.engine.server.api import NoAnswerError, RefusedError, Request
from gspo.engine.server.hosts import Host, Process
from gspo.engine.server.sglang import SglangApi
from gspo.engine.server.vllm import VllmApi
from gspo.errors import UserError

T = TypeVar("T")
ServerApi = VllmApi | SglangApi
_POLL_SECONDS = 0.25
_LOOK_SECONDS, _MOST_LOOKS = 5.0, 3  # at the health of a server that is busy
_ANSWER_SECONDS = 10.0  # of a server that is not busy with tokens or weights
_KEEP_SECONDS = 1.0  # a connection without requests: less than a server keeps it
_MOST_TEXT = 600  # characters of an answer in a message

_HOW = "docs/engines.md says how one is started, and with which GSPO_ENGINE_KEY"
HEALTH = Request(path="/health")


@dataclass(kw_only=True)
class Server:
    """A server, known under a name.

    Example: Server(name="server at http://node7:8000", api=api, client=new_client(), url="http://node7:8000", key=key)
    """

    name: str
    api: ServerApi
    client: httpx.AsyncClient  # of all servers
    url: str
    key: str  # that it wants; empty: none
    process: Process | None = None  # None: somebody else's
    problem: str = ""  # why it must be looked after before it is asked again
    about: Mapping[str, str] = field(default_factory=dict)  # its version and dtype
    label: str = ""  # of the policy's weights that it was given last
    gap_of_other_weights: float = 0.0  # the mean gap with weights that are not the policy's, in nats a token
    has_had_policy: bool = False  # since it was made ready: until then, only weights that are not the policy's
    num_recoveries: int = 0  # times that a problem has been mended
    adapters: dict[str, bool] = field(default_factory=dict)  # whether it has taken those that it was given, by label
    _num_users: int = 0  # that wait for completions
    _watch: asyncio.Task[None] | None = None

    async def ask(self, request: Request, *, seconds: float | None = None) -> Any:
        """The JSON that answers a request; None for an empty answer, or one of text.

        By itself the limit is that of a server that is not busy.
        """
        return await ask(self.client, self.url, request, key=self.key, seconds=seconds or _ANSWER_SECONDS)

    async def wait_until_ready(self, seconds: float, *, max_length: int) -> None:
        """Wait until it answers; UserError where it ends, is not ready in time, or would compute something else."""
        started = time.monotonic()
        while True:
            try:
                await self.ask(HEALTH)
                about = await self.ask(Request(path=self.api.about_path))
                break
            except RefusedError as error:
                raise UserError(f"it refuses this run's requests: {error}", where=self.name, fix=_HOW) from None
            except NoAnswerError as error:
                is_over = time.monotonic() - started > seconds
                if self.process is not None and self.process.has_ended():
                    raise UserError(f"it has ended while it started{self.log_end()}", where=self.name) from None
                if is_over:
                    what = f"it is not ready after {seconds:g} s: {error}{self.log_end()}"
                    fix = f"rollout.{self.api.name}.start_seconds gives it more time" if self.process else _HOW
                    raise UserError(what, where=self.name, fix=fix) from None
            await asyncio.sleep(_POLL_SECONDS)
        try:
            self.about = self.api.check(about, max_length=max_length)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"it is no {self.api.name} that gspo can use: {error}"
            raise UserError(what, where=self.name, fix=_HOW) from None

    async def unless_it_hangs(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that may take any time; NoAnswerError once the server does not answer of its health."""
        self._num_users += 1
        self._watch = watch = self._watch or asyncio.create_task(self._until_it_hangs())
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise NoAnswerError("it does not answer, not even of its health")
            return task.result()
        finally:
            task.cancel()
            self._num_users -= 1
            if not self._num_users:
                watch.cancel()
            if self._watch is watch and (not self._num_users or watch.done()):
                self._watch = None

    async def _until_it_hangs(self) -> None:
        """Return once it has not answered several looks at its health in a row."""
        num_failures = 0
        while num_failures < _MOST_LOOKS:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.ask(HEALTH)
                num_failures = 0
            except (NoAnswerError, RefusedError):
                num_failures += 1

    def end(self) -> None:
        """Kill its process, where it is this run's own."""
        if self.process is not None:
            self.process.end()

    def log_end(self) -> str:
        """The last lines of its log, for a message; nothing of somebody else's server."""
        if self.process is None:
            return ""
        return f"\n  {self.process.log}:\n    {self.process.said()}"


async def ask(client: httpx.AsyncClient, url: str, request: Request, *, key: str, seconds: float) -> Any:
    """The JSON with which the server at an address answers a request; None for an empty answer."""
    seconds, path = request.seconds or seconds, request.path
    method, url = "GET" if request.body is None else "POST", url.rstrip("/") + path
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = httpx.Timeout(seconds, connect=min(10.0, seconds), pool=None)
    try:
        answer = await client.request(method, url, json=request.body, headers=headers, timeout=limit)
        if answer.status_code >= 400:
            error = RefusedError if answer.status_code < 500 else NoAnswerError
            raise error(f"{path}: status {answer.status_code}: {answer.text[:_MOST_TEXT]}")
        return answer.json() if answer.content and request.is_json else None
    except httpx.TimeoutException:
        raise NoAnswerError(f"{path}: no answer within {seconds:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswerError(f"{path}: {type(error).__name__}: {error}") from None
    except ValueError:
        raise NoAnswerError(f"{path}: the answer is no JSON: {answer.text[:80]!r}") from None


def new_client() -> httpx.AsyncClient:
    """A client for as many requests at once as there are; no proxy stands between a trainer and its engine."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_SECONDS)
    return httpx.AsyncClient(limits=limits, trust_env=False)


def start_server(
    api: ServerApi, client: httpx.AsyncClient, host: Host, *, number: int, directory: Path, key: str, **options: Any
) -> Server:
    """Start a server in a process of its own, on a free port; it is not ready yet. Options are those of api.command."""
    port, log = host.free_port(), (directory / f"{api.name}_{number}.log").absolute()
    process = host.start(api.command(address=host.address, port=port, **options), api.environment(key), log)
    url = f"http://{host.address}:{port}"
    return Server(name=f"{api.name} server {number}", api=api, client=client, url=url, key=key, process=process)
