"""The server on loopback that agents ask for completions, in OpenAI's form or Anthropic's: an address a response."""

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

from gspo.errors import UserError
from gspo.rollout.dialects import Answer, Anthropic, OpenAI, RefusedError, Request

Dialect = type[OpenAI] | type[Anthropic]
_PATHS: Mapping[str, Dialect] = {
    "v1/chat/completions": OpenAI,
    "v1/messages": Anthropic,
    "v1/v1/messages": Anthropic,  # their client adds v1 to an address
}
_MOST_BYTES = 2**26  # of a request


@dataclass(kw_only=True, eq=False)
class _Session:
    answer: Callable[[Request], Coroutine[Any, Any, Answer]]
    given: Mapping[str, Any]  # the distribution that is sampled from, by a request's keys
    key: str
    context: Context = field(default_factory=copy_context)  # of who waits for the response: loop.have_waiter_do
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set)


class Endpoint:
    """Serves the sessions that are open, from the first on; it is used within the event loop."""

    def __init__(self) -> None:
        try:
            import uvicorn
        except ImportError:
            fix = "pip install -e '.[agents]' in the checkout"
            raise UserError("an agent needs uvicorn, which serves it", where="rollout.agent", fix=fix) from None
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2048)
        options: dict[str, Any] = {"interface": "asgi3", "http": "h11", "ws": "none", "proxy_headers": False}
        # A request that comes as the server closes its connection would be lost: the client closes those that wait.
        options |= {"timeout_keep_alive": 3600}
        options |= {"log_config": None, "lifespan": "off", "access_log": False, "timeout_graceful_shutdown": 1}
        config = uvicorn.Config(self._serve, **options)
        self._server, self._sessions = uvicorn.Server(config), dict[str, _Session]()
        self._serving: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        if self._serving is None:
            self._socket.close()

    @asynccontextmanager
    async def session(
        self, answer: Callable[[Request], Coroutine[Any, Any, Answer]], given: Mapping[str, Any]
    ) -> AsyncIterator[tuple[str, str]]:
        """An address, with the key that is asked for there, at which requests are answered within the block."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        name, key = secrets.token_hex(8), secrets.token_hex(16)
        session = self._sessions[name] = _Session(answer=answer, given=given, key=key)
        try:
            yield f"http://127.0.0.1:{self._socket.getsockname()[1]}/{name}/v1", key
        finally:
            del self._sessions[name]
            for task in session.tasks:
                task.cancel()
            await asyncio.gather(*session.tasks, return_exceptions=True)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, as ASGI has it."""
        if scope["type"] != "http":
            return None
        _, name, path = [*scope["path"].split("/", 2), "", ""][:3]
        dialect = _PATHS.get(path.strip("/"), OpenAI)
        try:
            session = self._found(name, path, scope)
            body = await _body(receive)
            answer = await self._answered(session, _read(dialect, body, session.given), receive)
        except RefusedError as error:
            return await _send(send, error.status, "application/json", json.dumps(dialect.error(str(error))))
        if answer is None:  # the agent has given it up
            return None
        model = str(body.get("model"))
        if not body.get("stream"):
            return await _send(send, 200, "application/json", json.dumps(dialect.response(answer, model)))
        text = ""
        for event, content in dialect.events(answer, model, body.get("stream_options") or {}):
            data = content if isinstance(content, str) else json.dumps(content)
            text += f"event: {event}\n" * (event is not None) + f"data: {data}\n\n"
        return await _send(send, 200, "text/event-stream", text)

    def _found(self, name: str, path: str, scope: Any) -> _Session:
        headers = {key.decode("latin1"): value.decode("latin1") for key, value in scope["headers"]}
        key = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
        session = self._sessions.get(name)
        if session is None:
            raise RefusedError("there is no such response under way: it has ended", 404)
        if not secrets.compare_digest(key.encode(), session.key.encode()):
            raise RefusedError("the key is not this response's: give the api_key that the agent was called with", 401)
        if path.strip("/") not in _PATHS or scope["method"] != "POST":
            raise RefusedError(f"{scope['method']} /{path} is not served: there are {', '.join(_PATHS)}", 404)
        return session

    async def _answered(self, session: _Session, request: Request, receive: Any) -> Answer | None:
        """The answer; None, and nothing is recorded, where the agent has gone before."""
        task = asyncio.create_task(session.answer(request), context=session.context.copy())
        session.tasks.add(task)
        gone = asyncio.ensure_future(receive())  # what comes next is that the client disconnects
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return None
            return task.result()
        except asyncio.CancelledError:
            raise RefusedError("the response has ended", 404) from None
        finally:
            task.cancel()
            gone.cancel()
            session.tasks.discard(task)


def _read(dialect: Dialect, body: Mapping[str, Any], given: Mapping[str, Any]) -> Request:
    try:
        return dialect.request(body, given)
    except (KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"the request is not of the form that is documented: {error!r}") from None


async def _body(receive: Any) -> dict[str, Any]:
    content, more = b"", True
    while more and len(content) <= _MOST_BYTES:
        part = await receive()
        content, more = content + part.get("body", b""), part.get("more_body", False)
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RefusedError("the request is no JSON object")
    return body


async def _send(send: Any, status: int, kind: str, text: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(text.encode())).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
