"""An engine whose sampling is done by servers, such as vLLM's, that have the policy's weights and are proven to."""

import asyncio
import math
import os
import resource
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import httpx
import torch

from gspo.errors import RunError, UserError
from gspo.model.policy import Policy
from gspo.model.routing import Routing
from gspo.recipe.rules import LOWEST_TEMPERATURE
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import RolloutConfig, ServerConfig
from gspo.rollout.engine import SamplingKey
from gspo.rollout.segments import text_and_segments
from gspo.rollout.servers.api import Asked, BadAnswerError, Generated, ServerApi
from gspo.rollout.servers.embedded import EmbeddedApi
from gspo.rollout.servers.fleet import Fleet
from gspo.rollout.servers.probe import LENGTH, Probe
from gspo.rollout.servers.process import LOOPBACK, Host, ThisHost
from gspo.rollout.servers.requests import NoAnswerError, RefusedError
from gspo.rollout.servers.server import Server
from gspo.rollout.servers.settings import check_experts, check_settings
from gspo.rollout.servers.sglang import REFUSED_OPTIONS as SGLANG_REFUSED
from gspo.rollout.servers.sglang import SglangApi
from gspo.rollout.servers.vllm import REFUSED_OPTIONS as VLLM_REFUSED
from gspo.rollout.servers.vllm import VllmApi
from gspo.rollout.servers.vllm_sender import check_transfer
from gspo.rollout.shaping import biased_ids
from gspo.rollout.stop_strings import StopStrings
from gspo.types import Experts, Group, Query, Sample, ShowProgress

_MOST_REQUESTS = 256  # of a server at once, each with a socket
_MOST_FILES = 65_536  # open at once, where the system allows it: a process has 1,024 by default


class ServerEngine:
    """Asks servers for groups of responses, token ids in and token ids out."""

    def __init__(
        self,
        api: ServerApi,
        policy: Policy,
        fleet: Fleet,
        *,
        request_seconds: float,
        returns_experts: bool,
        num_threads: int | None = None,
    ) -> None:
        """With `num_threads` the trainer gets so many of the cores, until the engine is closed."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_FILES if most < 0 else min(most, _MOST_FILES), most))
        self._threads_before = torch.get_num_threads()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._api, self._policy, self._fleet = api, policy, fleet
        self._request_seconds, self._returns_experts = request_seconds, returns_experts

    def sample(
        self,
        queries: Sequence[Query],
        settings: RolloutConfig,
        key: SamplingKey,
        *,
        record_experts: bool = False,
        check_stop: Callable[[], None] = lambda: None,
        show_progress: ShowProgress = lambda *_: None,
    ) -> tuple[Group, ...]:
        """Ask for all groups at the same time; what a server fails to answer is asked for again.

        Weights must have been published before.
        """
        asked = self._asked(queries, settings, key, record_experts)
        groups: dict[int, Group] = {}
        size = settings.group_size
        self._fleet.look_after()

        def look() -> None:
            check_stop()
            show_progress(len(groups) * size, len(asked) * size, "responses")

        num_failures = 0
        while missing := [number for number in range(len(asked)) if number not in groups]:
            problem = self._fleet.watch(
                lambda client: self._ask_all(client, queries, asked, missing, groups.__setitem__), look
            )
            num_left = len(asked) - len(groups)
            num_failures = num_failures + 1 if num_left == len(missing) else 1
            if num_left:
                self._fleet.recover(num_failures, problem)
        return tuple(groups[number] for number in range(len(queries)))

    def sample_beside(
        self,
        queries: Sequence[Query],
        settings: RolloutConfig,
        key: SamplingKey,
        put: Callable[[int, Group], None],
        *,
        record_experts: bool,
        check_stop: Callable[[], None],
    ) -> None:
        """Ask for all groups, and hand over what the servers answer, as BesideEngine has it."""
        asked, all_of_them = self._asked(queries, settings, key, record_experts), range(len(queries))
        self._fleet.watch(lambda client: self._ask_all(client, queries, asked, all_of_them, put), check_stop)

    def _asked(
        self, queries: Sequence[Query], settings: RolloutConfig, key: SamplingKey, record_experts: bool
    ) -> list[Asked]:
        assert self._fleet.version >= 0
        is_other = self._api.name != EmbeddedApi.name
        if is_other and key.step and settings.temperature < LOWEST_TEMPERATURE:  # a rule looks at the recipe
            what = f"a hook has set the temperature to {settings.temperature:g}, and a server samples at 0.01 or more"
            raise UserError(what, where="hooks", fix=f"set {LOWEST_TEMPERATURE} or more")
        biases = biased_ids(settings.logit_bias, self._policy.tokenizer, len(self._policy.head.weight))
        size = settings.group_size
        keys = key.response_keys([query.id for query in queries], size)
        return [
            Asked(
                prompt_ids=query.prompt_ids,
                keys=keys[place * size : (place + 1) * size],
                stop_ids=self._policy.stop_ids,
                settings=settings,
                biases=biases,
                wants_experts=record_experts and self._returns_experts,
            )
            for place, query in enumerate(queries)
        ]

    def publish(self, policy: Policy, version: int) -> None:
        """Hand the weights to the servers, and prove that each has them; RunError where one has not."""
        assert policy is self._policy
        if version != self._fleet.version:
            self._fleet.publish(version)

    def take_metrics(self) -> Mapping[str, float]:
        """What publishing took since the last call and what has failed; the gap of the last proof, if there was one."""
        fleet, gap = self._fleet, self._fleet.gap
        measured = {
            "publish_seconds": fleet.publish_seconds,
            "probe_gap_mean": math.nan if gap is None else gap.mean,
            "probe_gap_max": math.nan if gap is None else gap.most,
            "probe_gap_of_other_weights": min(server.gap_of_other_weights for server in fleet.servers),
            "retries": float(fleet.counts["retries"]),
            "restarts": float(fleet.counts["restarts"]),
        }
        fleet.publish_seconds, fleet.counts = 0.0, Counter()
        return {f"engine/{name}": value for name, value in measured.items()}

    def describe(self) -> Mapping[str, str]:
        """The server's version and dtype."""
        return {"engine": self._api.name, **self._fleet.servers[0].about}

    def close(self) -> None:
        """End the servers that this run has started."""
        self._fleet.close()
        torch.set_num_threads(self._threads_before)

    async def _ask_all(
        self,
        client: httpx.AsyncClient,
        queries: Sequence[Query],
        asked: Sequence[Asked],
        missing: Sequence[int],
        put: Callable[[int, Group], None],
    ) -> str:
        """Ask once for each of the missing groups, shared out to the servers; the first problem, if there is one."""
        steps = 1 + max((group.settings.max_staleness for group in asked), default=0)  # that are asked for side by side
        servers = [server for server in self._fleet.servers if not server.problem] or self._fleet.servers

        async def ask(server: Server, number: int, some: asyncio.Semaphore) -> None:
            group = asked[number]
            try:
                async with some:
                    since = self._fleet.proven_version  # another may be published meanwhile
                    request = self._api.sample(group, self._fleet.label_of(since))
                    answer = await server.ask(client, request, seconds=self._request_seconds * steps)
                responses = self._api.read(answer, group)
                put(number, self._group(queries[number], responses, group.settings, since=since))
            except RefusedError as error:
                raise RunError(f"{server.name} refuses a request: {error}") from None
            except (NoAnswerError, BadAnswerError) as error:
                server.problem = server.problem or f"{server.name}: {error}"

        async def ask_server(place: int, server: Server) -> None:
            some = asyncio.Semaphore(max(1, _MOST_REQUESTS // steps))
            work = asyncio.gather(*(ask(server, number, some) for number in missing[place :: len(servers)]))
            watch = asyncio.create_task(server.until_it_hangs(client))
            try:
                await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                else:
                    server.problem = server.problem or f"{server.name}: it does not answer, not even of its health"
            finally:  # of a stop, too
                work.cancel()
                watch.cancel()
                await asyncio.gather(work, watch, return_exceptions=True)

        await asyncio.gather(*(ask_server(place, server) for place, server in enumerate(servers)))
        return next((server.problem for server in servers if server.problem), "")

    def _group(self, query: Query, responses: Sequence[Generated], settings: RolloutConfig, *, since: int) -> Group:
        """The samples of an answer; BadAnswerError where other weights have drawn them than since a version."""
        versions = self._fleet.versions(since)
        if others := {label for response in responses for label, _ in response.labels} - versions.keys():
            raise BadAnswerError(f"sampled with the weights {', '.join(others)}, not {self._fleet.label}")
        stops = StopStrings(self._policy.tokenizer, settings.stop_strings, lambda _: query.prompt_ids)
        for number, response in enumerate(responses if settings.stop_strings else ()):
            stops.read(number, response.token_ids)  # the server knows token ids only, and samples on
        samples = [
            self._sample(query, response, settings, versions, end=stops.ends.get(number))
            for number, response in enumerate(responses)
        ]
        return Group(samples=tuple(samples))

    def _sample(
        self,
        query: Query,
        response: Generated,
        settings: RolloutConfig,
        versions: Mapping[str, int],
        *,
        end: int | None,
    ) -> Sample:
        """The response as a sample; `end`: where a stop string is complete."""
        ids, logprobs = response.token_ids[:end], torch.tensor(response.logprobs[:end])
        full = response.full_logprobs and response.full_logprobs[:end]
        is_other = self._api.name != EmbeddedApi.name  # which says where q is not π
        unknown = torch.full_like(logprobs, torch.nan) if settings.shaping and is_other else None
        text, segments = text_and_segments(ids, query.prompt_ids, self._policy, settings.segment_separator)
        ends = [min(end, len(ids)) for end in accumulate(count for _, count in response.labels)]  # a stop string cuts
        spans = zip(response.labels, pairwise([0, *ends]), strict=True)
        return Sample(
            query=query,
            token_ids=torch.tensor(ids),
            loss_mask=torch.ones(len(ids), dtype=torch.bool),
            text=text,
            sampler_logprobs=logprobs,
            full_logprobs=torch.tensor(full) if full else unknown,
            finish_reason="stop" if end else response.finish_reason,
            versions=tuple((versions[label], end - start) for (label, _), (start, end) in spans if end > start),
            experts=experts_of(
                response, num_prompt=len(query.prompt_ids), num_tokens=len(ids), routing=self._policy.routing
            ),
            segments=segments,
        )


def experts_of(response: Generated, *, num_prompt: int, num_tokens: int, routing: Routing | None) -> Experts | None:
    """The experts of a response's first tokens as a sample has them; None where the server has returned none."""
    if response.experts is None or routing is None:
        return None
    experts = torch.from_numpy(response.experts.astype("int64")).to(routing.dtype)
    last = num_prompt - 1  # the prompt's last token predicts the response's first
    return Experts(prefix=experts[:last], row=experts[last : last + num_tokens])


def server_engine(recipe: Recipe, policy: Policy, *, longest_sequence: int, **options: Any) -> ServerEngine:
    """The engine of a recipe whose `rollout.engine` is a server; options are those of Fleet."""
    rollout, routing = recipe.rollout, policy.routing
    settings: ServerConfig = getattr(rollout, rollout.engine)
    group_sizes = [
        rollout.group_size,
        recipe.evaluation.samples,
        *(suite.samples for suite in recipe.evaluation.suites),
    ]
    max_rows = max(rollout.max_rows, *group_sizes)
    returns_experts = recipe.actor.routing_replay == "engine" or rollout.engine == "embedded"
    common: dict[str, Any] = {"max_rows": max_rows, "at_publish": rollout.at_publish}
    api: ServerApi
    if rollout.engine == "vllm":
        api = VllmApi(settings, group_size=max(group_sizes), returns_experts=returns_experts, **common)
    elif rollout.engine == "sglang":
        experts = (routing.num_layers, routing.top_k) if returns_experts and routing else None
        api = SglangApi(settings, experts=experts, **common)
    else:
        api = EmbeddedApi(settings, model=recipe.model, stop_tokens=rollout.stop_tokens, routing=routing, **common)
    dtype = str(policy.dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype
    max_length = max(longest_sequence, LENGTH)
    probe = Probe(policy, getattr(torch, dtype), rollout)
    shares_cores = policy.device.type == "cpu" and rollout.at_publish != "none" and "OMP_NUM_THREADS" not in os.environ
    hosts = _hosts(recipe, settings, shares_cores=shares_cores)
    fleet = Fleet(api, policy, probe, settings, hosts, dtype=dtype, max_length=max_length, **options)
    return ServerEngine(
        api,
        policy,
        fleet,
        request_seconds=settings.request_seconds,
        returns_experts=returns_experts,
        num_threads=max(1, torch.get_num_threads() // 2) if shares_cores and hosts else None,
    )


def _hosts(recipe: Recipe, settings: ServerConfig, *, shares_cores: bool) -> list[Host]:
    """Where the run's own servers are started, one on each; on a CPU they share half of the cores."""
    if settings.urls:
        return []
    if not recipe.cluster.engines:
        devices = settings.devices or (None,)
        threads = max(1, torch.get_num_threads() // 2 // len(devices)) if shares_cores else None
        return [ThisHost(devices=each, threads=threads) for each in devices]
    from gspo.rollout.servers.ray_host import ray_hosts

    hosts = ray_hosts(recipe.cluster.engines)
    if settings.weights == "memory" and any(host.address != LOOPBACK for host in hosts):
        where, fix = (
            f"rollout.{recipe.rollout.engine}.weights",
            "set files, with a weights_dir that all hosts share, or nccl",
        )
        raise UserError("memory is this machine's, and Ray has placed a server on another", where=where, fix=fix)
    return [*hosts]


def check_servers(recipe: Recipe, *, device: torch.device, longest_sequence: int) -> None:
    """UserError where the servers of the recipe could not be started, or would compute something else."""
    name = recipe.rollout.engine
    if name == "embedded":
        return
    refused = {"vllm": VLLM_REFUSED, "sglang": SGLANG_REFUSED}[name]
    check_settings(name, getattr(recipe.rollout, name), refused, longest=longest_sequence)
    check_transfer(name, getattr(recipe.rollout, name), device, on_cluster=recipe.cluster.engines > 0)
    if recipe.actor.routing_replay == "engine":
        check_experts(name, device)
