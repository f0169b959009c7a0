"""Requests to servers over HTTP."""

import functools
import ssl
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

from gspo import loop

_KEEP_SECONDS = 1.0  # a connection without requests: less than a server keeps it
_MOST_TEXT = 600  # characters of an answer in a message

T = TypeVar("T")


class NoAnswerError(Exception):
    """The server has not answered, or not with an answer: asking again may help; the text says what came instead."""


class RefusedError(Exception):
    """The server refuses the request: asking again would not help; the text is what the server says."""


class Address:
    """The address where a server listens, and the key that it wants."""

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
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_SECONDS)
    return httpx.AsyncClient(limits=limits, trust_env=False, verify=_certificates())


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: that takes longer than everything else that gspo does for a step's requests."""
    return httpx.create_ssl_context(trust_env=False)


class Connection:
    """An engine's requests in the event loop of the process, and their client."""

    def __init__(self) -> None:
        self.client = new_client()
        self._under_way: set[Future[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; cancelling the future cancels it."""
        future = loop.start(work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def close(self) -> None:
        """Cancel what is under way; a second call does nothing."""
        for future in [*self._under_way]:
            future.cancel()
        loop.start(self.client.aclose()).result()
