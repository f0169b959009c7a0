"""An engine whose sampling is done by servers, such as vLLM's, that have the policy's weights and are proven to."""

import asyncio
import math
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from gspo import loop
from gspo.engine.engine import Completion, LostError, Prompt, Sampling, in_groups
from gspo.engine.server.api import BadAnswerError, NoAnswerError, RefusedError, SampleRequest
from gspo.engine.server.fleet import Fleet
from gspo.engine.server.server import Server
from gspo.errors import RunError

_MOST_FILES = 65_536  # sockets at once, where the system allows it: a process has 1,024 files by default


class ServerEngine:
    """An engine that asks servers to complete prompts, token ids in and token ids out."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        request_seconds: float,
        experts: torch.dtype | None = None,
        num_threads: int | None = None,
    ) -> None:
        """`experts`: how they are recorded, where the servers return any.

        With `num_threads` the trainer gets so many of the cores, until the engine is closed.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_FILES if most < 0 else min(most, _MOST_FILES), most))
        self._threads_before = torch.get_num_threads()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._fleet, self._request_seconds, self._experts = fleet, request_seconds, experts
        self.num_tokens = 0  # sampled so far
        self._under_way: set[Future[None]] = set()

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Future[Completion]]:
        """Ask for all at the same time, as Engine has it: a group in one request, shared out to servers.

        Weights must have been published before.
        """
        assert self._fleet.version >= 0
        futures = [Future[Completion]() for _ in prompts]
        servers = [server for server in self._fleet.servers if not server.problem] or self._fleet.servers
        for place, group in enumerate(in_groups(prompts)):
            own, server = [futures[number] for number in group], servers[place % len(servers)]
            asked = loop.start(self._answer(server, [prompts[number] for number in group], sampling, own))
            self._under_way.add(asked)
            asked.add_done_callback(self._under_way.discard)
            _cancel_with(own, asked)
        return futures

    async def _answer(
        self, server: Server, prompts: Sequence[Prompt], sampling: Sampling, futures: Sequence[Future[Completion]]
    ) -> None:
        num_recoveries, completions = server.num_recoveries, list[Completion]()
        error: Exception | None = None
        try:
            completions = await self._ask(server, prompts, sampling)
            self._fleet.num_failures = 0
            self.num_tokens += sum(len(completion.token_ids) for completion in completions)
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        except RefusedError as refused:
            error = RunError(f"{server.name} refuses a request: {refused}")
        except (NoAnswerError, BadAnswerError) as problem:
            error = LostError(f"{server.name}: {problem}")
            if server.num_recoveries == num_recoveries:  # else it has its weights again already
                server.problem = server.problem or str(error)
        except Exception as other:
            error = other
        for number, future in enumerate(futures):
            with suppress(InvalidStateError):  # it is given up
                if error is None:
                    future.set_result(completions[number])
                else:
                    future.set_exception(error)

    async def _ask(self, server: Server, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        fleet, since = self._fleet, self._fleet.proven_version
        experts = self._experts if sampling.record_experts else None
        versions, base = fleet.versions(since), fleet.base
        request = SampleRequest(prompts=prompts, sampling=sampling, versions=versions, base=base, experts=experts)
        if fleet.adapters and not server.adapters.get(request.label):  # it would refuse, which ends the run
            raise LostError(f"{server.name} has been looked after, and does not have the adapter {request.label}")
        work = server.ask(server.api.sample(request), seconds=self._request_seconds)
        with fleet.adapters.needed(request.label) if fleet.adapters else nullcontext():
            answer = await server.unless_it_hangs(work)
        # Other weights may have been published meanwhile.
        return server.api.read(answer, replace(request, versions=fleet.versions(since)))

    def publish(self, version: int) -> None:
        """Hand the weights to the servers, and prove that each has them; RunError where one has not.

        A version that they have is handed to those alone that have failed.
        """
        self._fleet.publish(version)

    def take_metrics(self) -> Mapping[str, float]:
        """Return what publishing took since the last call, what has failed, and the gap of the last proof, if any."""
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
        server = self._fleet.servers[0]
        return {"engine": server.api.name, **server.about}

    def close(self) -> None:
        """End the servers that this run has started."""
        for asked in [*self._under_way]:
            asked.cancel()
        self._fleet.close()
        torch.set_num_threads(self._threads_before)


def _cancel_with(futures: Sequence[Future[Completion]], work: Future[Any]) -> None:
    """Cancel the work once all of the futures are cancelled."""

    def look(_: object) -> None:
        if all(future.cancelled() for future in futures):
            work.cancel()

    for future in futures:
        future.add_done_callback(look)
