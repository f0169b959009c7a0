"""What gspo costs on top of a bare client that sends the same requests to the same server."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from benchmarks.decode import spread
from benchmarks.engines.sampling import Work
from gspo.engine.engine import Prompt, Sampling
from gspo.engine.server.api import SampleRequest
from gspo.engine.server.engine import ServerEngine
from gspo.model.policy import Policy
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Group

HEAD = ["sequences × tokens", "bare client, s", "gspo, s", "gspo / bare", "goal"]
HEAD += ["CPU of the bare client, s", "CPU of gspo, s", "their difference / bare, s"]
GOAL = 1.05


def table_row(work: Work, policy: Policy, engine: ServerEngine, rounds: int) -> list[str]:
    """Seconds of both, taking turns with the same seeds; a first round warms up.

    What the trainer's process computes is in the table, too: beside the server's time it says what gspo costs even
    where that time varies by more.
    """
    seconds: dict[str, list[tuple[float, float]]] = {"bare": [], "gspo": []}
    queries, sampler = work.queries(policy), Sampler(engine, policy)
    for number in range(rounds + 1):
        key, answers = SamplingKey(seed=number, step=1), dict[str, list[list[int]]]()

        def bare(key: SamplingKey = key, answers: dict[str, list[list[int]]] = answers) -> None:
            requests = _requests(work, policy, engine, key)
            answers["bare"] = _tokens_of(asyncio.run(ask_all(*_place(engine), requests)))

        def gspo(key: SamplingKey = key, answers: dict[str, list[list[int]]] = answers) -> None:
            answers["gspo"] = _tokens(sampler.sample(queries, work.settings, key))

        for side in (bare, gspo) if number % 2 else (gspo, bare):
            taken = _measured(side)
            if number:
                seconds[side.__name__].append(taken)
        if answers["bare"] != answers["gspo"]:
            sys.exit(f"{work.name}: the same requests have brought other tokens")
    walls, computed = ([[pair[place] for pair in seconds[side]] for side in ("bare", "gspo")] for place in (0, 1))
    ratios = [own / bare for bare, own in zip(*walls, strict=True)]
    added = [(own - less) / wall for less, own, wall in zip(*computed, walls[0], strict=True)]
    return [work.name, *map(spread, walls), spread(ratios), f"{GOAL}", *map(spread, (*computed, added))]


async def ask_all(url: str, headers: Mapping[str, str], requests: Sequence[Any]) -> list[Any]:
    """The bare client: all requests at once, and the JSON of the answers."""
    async with httpx.AsyncClient(timeout=None, trust_env=False, verify=False, headers=headers) as client:

        async def ask(request: Any) -> Any:
            return (await client.post(url, json=request)).json()

        return await asyncio.gather(*map(ask, requests))


def _requests(work: Work, policy: Policy, engine: ServerEngine, key: SamplingKey) -> list[Any]:
    """The JSON that the engine sends for the same key."""
    queries, sampling = work.queries(policy), Sampling(stop_ids=policy.stop_ids)
    groups = key.of_groups([query.id for query in queries], work.settings.group_size)
    asked = [
        [Prompt(ids=query.prompt_ids, key=own, max_new_tokens=work.tokens) for own in keys]
        for query, keys in zip(queries, groups, strict=True)
    ]
    versions = engine._fleet.versions(engine._fleet.version)
    requests = [SampleRequest(prompts=prompts, sampling=sampling, versions=versions) for prompts in asked]
    return [engine._fleet.servers[0].api.sample(request).body for request in requests]


def _place(engine: ServerEngine) -> tuple[str, Mapping[str, str]]:
    server = engine._fleet.servers[0]
    return f"{server.url}/inference/v1/generate", {"Authorization": f"Bearer {server.key}"}


def _tokens_of(answers: Sequence[Any]) -> list[list[int]]:
    return [choice["token_ids"] for answer in answers for choice in answer["choices"]]


def _tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [sample.token_ids.tolist() for group in groups for sample in group.samples]


def _measured(side: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and those that this process has computed."""
    wall, computed = time.perf_counter(), time.process_time()
    side()
    return time.perf_counter() - wall, time.process_time() - computed
