"""Requests to servers over HTTP, sent from a thread of their own while the caller looks after signals."""

import asyncio
import functools
import ssl
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

_LOOK_SECONDS = 0.05  # between two looks at signals
_MOST_TEXT = 600  # characters of an answer in a message

T = TypeVar("T")


class NoAnswerError(Exception):
    """The server has not answered, or not with an answer: asking again may help; the text says what came instead."""


class RefusedError(Exception):
    """The server refuses the request: asking again would not help; the text is what the server says."""


class Address:
    """Where a server listens, and the key that it wants."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def ask(self, client: httpx.AsyncClient, path: str, body: Any = None, *, seconds: float) -> Any:
        """The JSON that answers a GET, or with a body a POST; None for an empty answer."""
        method, url = "GET" if body is None else "POST", self.url + path
        try:
            limit = httpx.Timeout(seconds, connect=min(10.0, seconds), pool=None)
            answer = await client.request(method, url, json=body, headers=self.headers, timeout=limit)
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


def new_client() -> httpx.AsyncClient:
    """A client for as many requests at once as there are; no proxy stands between a trainer and its engine."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(limits=limits, trust_env=False, verify=_certificates())


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: that takes longer than everything else that gspo does for a step's requests."""
    return httpx.create_ssl_context(trust_env=False)


def run_watched(work: Callable[[], Coroutine[Any, Any, T]], check: Callable[[], None]) -> T:
    """The result of a coroutine, run in a thread of its own; what `check`, called again and again, raises cancels it.

    A thread, for the caller may have an event loop of its own, as a notebook has.
    """
    result: Future[T] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def main() -> T:
        task = asyncio.ensure_future(work())
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def in_thread() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:
            if not started.done():  # no event loop could be made
                started.set_exception(error)
            result.set_exception(error)

    thread = threading.Thread(target=in_thread, name="gspo-requests", daemon=True)
    thread.start()
    loop, task = started.result()
    try:
        while True:
            thread.join(_LOOK_SECONDS)
            if not thread.is_alive():
                return result.result()
            check()
    except BaseException:
        if thread.is_alive():
            loop.call_soon_threadsafe(task.cancel)
            thread.join(5.0)
        raise
