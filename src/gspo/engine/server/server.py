"""One server: where it listens, what it answers and, where this run has started it, its process."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gspo.engine.server.api import Request, ServerApi
from gspo.engine.server.ray_host import Host, Process
from gspo.errors import UserError

_KEEP_SECONDS = 1.0  # a connection without requests: less than a server keeps it
_MOST_TEXT = 600  # characters of an answer in a message
_POLL_SECONDS = 0.25
_LOOK_SECONDS, _MOST_LOOKS = 5.0, 3  # at the health of a server that is busy
_ANSWER_SECONDS = 10.0  # of a server that is not busy with tokens or weights

_HOW = "docs/engines.md says how one is started, and with which GSPO_ENGINE_KEY"
_HEALTH = Request(path="/health")


class NoAnswerError(Exception):
    """The server has not answered, or not with an answer: asking again may help; the text says what came instead."""


class RefusedError(Exception):
    """The server refuses the request: asking again would not help; the text is what the server says."""


def new_client() -> httpx.AsyncClient:
    """A client for as many requests at once as there are; no proxy stands between a trainer and its engine."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_SECONDS)
    return httpx.AsyncClient(limits=limits, trust_env=False)


@dataclass(kw_only=True)
class Server:
    """A server, known under a name.

    Example: Server(name="server at node7", api=api, client=client, url="http://node7:8000", key=key)
    """

    name: str
    api: ServerApi
    client: httpx.AsyncClient
    url: str
    key: str
    process: Process | None = None  # None: somebody else's
    problem: str = ""  # why it must be looked after before it is asked again
    about: Mapping[str, str] = field(default_factory=dict)  # its version and dtype
    gap_of_other_weights: float = 0.0  # the mean gap with weights that are not the policy's, in nats a token
    has_had_policy: bool = False  # since it was made ready: until then, only weights that are not the policy's
    num_recoveries: int = 0  # times that a problem has been mended
    _num_silent_looks: int = 0  # at its health, in a row
    _looked_at: float = 0.0  # time.monotonic()

    async def ask(self, request: Request, *, seconds: float | None = None) -> Any:
        """Return the JSON that answers a request, None where that is empty.

        The request's own limit goes before `seconds`. NoAnswerError where asking again may help,
        RefusedError where it would not.
        """
        method, path = "GET" if request.body is None else "POST", request.path
        url = self.url.rstrip("/") + path
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        seconds = request.seconds or seconds or _ANSWER_SECONDS
        limit = httpx.Timeout(seconds, connect=min(10.0, seconds), pool=None)
        try:
            answer = await self.client.request(method, url, json=request.body, headers=headers, timeout=limit)
            if answer.status_code >= 400:
                error = RefusedError if answer.status_code < 500 else NoAnswerError
                raise error(f"{path}: status {answer.status_code}: {answer.text[:_MOST_TEXT]}")
            return answer.json() if answer.content else None
        except httpx.TimeoutException:
            raise NoAnswerError(f"{path}: no answer within {seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoAnswerError(f"{path}: {type(error).__name__}: {error}") from None
        except ValueError:
            raise NoAnswerError(f"{path}: the answer is no JSON: {answer.text[:80]!r}") from None

    async def is_well(self) -> bool:
        """Tell whether it answers of its health."""
        try:
            await self.ask(_HEALTH)
            return True
        except (NoAnswerError, RefusedError):
            return False

    async def ask_unless_it_hangs(self, request: Request, *, seconds: float) -> Any:
        """Return the answer to a request that may take any time; NoAnswerError once the server hangs.

        Those who wait share looks at its health; it hangs once several in a row are in vain.
        """
        task = asyncio.create_task(self.ask(request, seconds=seconds))
        try:
            while not (await asyncio.wait((task,), timeout=_LOOK_SECONDS))[0]:
                if self._num_silent_looks >= _MOST_LOOKS:
                    raise NoAnswerError("it does not answer, not even of its health")
                if time.monotonic() - self._looked_at > _LOOK_SECONDS:
                    self._looked_at = time.monotonic()
                    self._num_silent_looks = 0 if await self.is_well() else self._num_silent_looks + 1
            return task.result()
        finally:
            task.cancel()

    def mend(self) -> None:
        """Forget its problem: it may be asked again."""
        self.problem, self._num_silent_looks = "", 0
        self.num_recoveries += 1

    async def wait_until_ready(self, seconds: float, *, max_length: int) -> None:
        """Wait until it answers; UserError where it ends, is not ready in time, or would compute something else."""
        started = time.monotonic()
        while True:
            try:
                await self.ask(_HEALTH)
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

    def log_end(self) -> str:
        """The last lines of its log, for a message; nothing of somebody else's server."""
        if self.process is None:
            return ""
        return f"\n  {self.process.log}:\n    {self.process.said()}"


def start_server(
    api: ServerApi,
    host: Host,
    client: httpx.AsyncClient,
    *,
    number: int,
    directory: Path,
    key: str,
    **options: Any,
) -> Server:
    """Start a server in a process of its own, on a free port; it is not ready yet. Options are those of api.command."""
    port, log = host.free_port(), (directory / f"{api.name}_{number}.log").absolute()
    process = host.start(api.command(address=host.address, port=port, **options), api.environment(key), log)
    url, name = f"http://{host.address}:{port}", f"{api.name} server {number}"
    return Server(name=name, api=api, client=client, url=url, key=key, process=process)
