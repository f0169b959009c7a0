"""A server that is looked after while others go on does not have the adapter that they sample with."""

import asyncio
import json
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx

from gspo import loop
from gspo.engine.engine import LostError, Prompt, Sampling
from gspo.engine.server.engine import ServerEngine
from gspo.engine.server.fleet import Fleet
from gspo.engine.server.server import Server
from gspo.engine.server.vllm import VllmApi
from gspo.engine.server.weights import Adapters
from gspo.recipe.sections import ServerConfig

LABEL = "a-1"


class Adapted:
    """An engine whose one server answers as vLLM does: with 404 for an adapter that it does not have."""

    def __init__(self) -> None:
        self.has, self.asked_while_it_loads = set[str](), list[object]()
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        api = VllmApi(ServerConfig(), max_rows=1, returns_experts=False, lora={"enable_lora": True})
        self.server = Server(name="vLLM", api=api, client=client, url="http://server", key="")
        self.files = ExitStack()
        self._adapters = Adapters(cast("Any", None), api, None)
        self._adapters._kept[LABEL] = self.files, Path("adapter")
        names = {"servers": [self.server], "version": 1, "proven_version": 1, "base": "base"}
        fleet = SimpleNamespace(**names, adapters=self._adapters, versions=lambda since: {f"a-{since}": since})
        self._engine = ServerEngine(cast("Fleet", fleet), request_seconds=5)

    def hand_over(self) -> None:
        loop.run(self._hand_over())

    async def _hand_over(self) -> None:
        with self._adapters.ready(LABEL) as hand_over:
            await hand_over(self.server, LABEL)

    def unload_all_but(self, label: str) -> None:
        loop.run(self._adapters.unload_all_but(label, [self.server]))

    def needed(self) -> AbstractContextManager[None]:
        return self._adapters.needed(LABEL)

    def ask(self) -> object:
        return loop.run(self._ask())

    async def _ask(self) -> object:
        """The token that is sampled, or the error."""
        prompt = Prompt(ids=(4, 5), key=1, max_new_tokens=1)
        try:
            completion = await asyncio.wrap_future(self._engine.submit([prompt], Sampling())[0])
        except Exception as error:
            return type(error)
        return completion.token_ids.item()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body, path = json.loads(request.content), request.url.path
        if path == "/v1/unload_lora_adapter":
            self.has.remove(body["lora_name"])
        elif path == "/v1/load_lora_adapter":
            self.asked_while_it_loads.append(await self._ask())
            self.has.add(body["lora_name"])
        elif body["model"] not in self.has:
            return httpx.Response(404)
        else:
            content, spans = [{"token_id": 3, "logprob": -1.0}], [{"version": "base", "start": 0, "end": 1}]
            choice = {"index": 0, "token_ids": [3], "finish_reason": "length", "weight_versions": spans}
            return httpx.Response(200, json={"choices": [{**choice, "logprobs": {"content": content}}]})
        return httpx.Response(200)


def test_what_is_asked_of_a_server_without_its_adapter_is_lost_and_can_be_asked_again() -> None:
    adapted = Adapted()  # as after a start in the midst of a run
    assert adapted.ask() is LostError
    assert not adapted.server.problem  # there is nothing more to look after
    for _ in range(2):  # the second time it has failed since
        adapted.hand_over()
        assert adapted.ask() == 3
    assert adapted.asked_while_it_loads == [LostError] * 2


def test_a_version_is_there_until_the_next_one_is_and_nobody_needs_it() -> None:
    adapted, removed = Adapted(), list[str]()
    adapted.files.callback(removed.append, "its files")
    adapted.hand_over()
    adapted.unload_all_but(LABEL)
    with adapted.needed():
        adapted.unload_all_but("a-2")
    assert adapted.has == {LABEL} and not removed
    adapted.unload_all_but("a-2")
    assert (adapted.has, removed) == (set(), ["its files"])
