"""The servers of a run: started or found, given the policy's weights, proven to have them, and looked after."""

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from gspo import loop
from gspo.engine.engine import Completion
from gspo.engine.server.api import BadAnswerError, NoAnswerError, RefusedError, Request
from gspo.engine.server.hosts import Host
from gspo.engine.server.probe import Gap, Probe
from gspo.engine.server.server import HEALTH, Server, ServerApi, new_client, start_server
from gspo.engine.server.vllm import GPU_TRANSFERS, VllmApi
from gspo.engine.server.vllm_transfer import Transfer
from gspo.engine.server.weights import Adapters, HandOver, by_files
from gspo.errors import RunError, UserError
from gspo.model.lora import with_adapter, without_effect
from gspo.model.policy import Policy
from gspo.recipe.sections import ServerConfig

KEY_VARIABLE = "GSPO_ENGINE_KEY"
_MOST_FAILURES = 3  # attempts in a row without a new response
_END_SECONDS = 2.0  # until a server that is lost has ended
_MIN_RATIO = 3.0  # of the gap that others than the policy's weights have to that of the policy's
_PROBE_SECONDS = 120.0
_FOUND_SECONDS = 30.0  # in which a server that runs already must answer


class Fleet:
    """The servers of a run, one or several, all with the same weights."""

    def __init__(
        self,
        api: ServerApi,
        policy: Policy,
        probe: Probe,
        settings: ServerConfig,
        hosts: Sequence[Host],
        *,
        dtype: str,
        max_length: int,
        directory: Path,
        say: Callable[[str], object],
    ) -> None:
        """A server is started on each of the hosts; without any, those of the settings' `urls` run already."""
        self._api, self._hosts, self._probe, self._settings = api, hosts, probe, settings
        # Makes the weights, scrambled ones if wanted, ready to be handed over.
        self._weights: Callable[..., AbstractContextManager[HandOver]]
        self._weights = partial(by_files, policy, settings.weights_dir)
        if settings.weights in GPU_TRANSFERS:
            self._weights = Transfer(policy, settings.weights).ready
        applies = isinstance(api, VllmApi) and api.lora
        self.adapters = Adapters(policy, api, settings.weights_dir) if applies else None  # else one is merged
        # What is beneath an adapter is proven by itself, but where merging the adapter may round its part away.
        self._model, is_exact = policy.model, policy.dtype == torch.float32
        self._beneath = without_effect(policy.model) if self.adapters or is_exact else None
        self._run_name = secrets.token_hex(4)  # part of each label, so that no other run's weights pass for this one's
        self._labels: dict[int, str] = {}  # by version
        self._times = count(2)  # that a version is published
        key = os.environ.get(KEY_VARIABLE, "") if settings.urls else secrets.token_urlsafe(32)
        model = (directory / f"{api.name}_model").absolute()
        self._options: dict[str, Any] = {"model": model, "max_length": max_length, "dtype": dtype}
        self._options |= {"kind": policy.device.type, "directory": directory, "key": key}
        if not key.isascii():
            raise UserError("it is not ASCII, as a header of HTTP is", where=KEY_VARIABLE, fix="set another key")
        self.version = -1  # none is published yet
        self.proven_version = -1  # that all servers have had, at the least
        self.num_failures = 0  # recoveries in a row without a new completion
        self.counts: Counter[str] = Counter()  # since they were taken last
        self.publish_seconds = 0.0
        self.gap: Gap | None = None  # of the last proof
        self.servers: list[Server] = []
        self.client = new_client()
        try:
            say(f"{'starting' if hosts else 'looking for'} {api.name}")
            if hosts:
                policy.model.config.architectures = [policy.architecture]
                policy.model.config.save_pretrained(model)
                policy.tokenizer.save_pretrained(model)
            for url in settings.urls:
                self.servers.append(Server(name=f"server at {url}", api=api, client=self.client, url=url, key=key))
            for number in range(len(hosts)):
                self.servers.append(self._start(number))
            seconds = min(_FOUND_SECONDS, settings.start_seconds) if settings.urls else settings.start_seconds
            self._make_ready(self.servers, seconds=seconds)
        except BaseException as error:
            self.close()
            if type(error) is not RunError:
                raise
            fix = f"use a server of the policy's model, and a version of {api.name} that docs/engines.md names"
            raise UserError(str(error), where=f"rollout.{api.name}", fix=fix) from None  # nothing has been done yet

    def versions(self, since: int) -> dict[str, int]:
        """The labels of the versions from one on that can be at work: up to the one that is published last.

        A request that begins with an adapter ends with it.
        """
        last = since if self.adapters else self.version
        return {self._label_of(version): version for version in range(since, last + 1)}

    @property
    def base(self) -> str:
        """The label of the weights beneath adapters; empty where those are merged."""
        return f"{self._run_name}-base" if self.adapters else ""

    def _label_of(self, version: int) -> str:
        """The name of the weights of a version, and of no others ever: a server may keep what it knows of a name."""
        return self._labels.get(version, f"{self._run_name}-{version}")

    def publish(self, version: int) -> None:
        """Hand the policy's present weights to all servers, and prove each; RunError where one has others.

        A version that they have is handed to those alone that have failed: while the policy is trained nobody could.
        """
        is_new, self.version = version != self.version, version
        if is_new:
            again = f"-{next(self._times)}" if version in self._labels else ""
            self._labels[version] = f"{self._run_name}-{version}{again}"
        try:
            try:
                self._recover()
                if is_new:
                    self._publish(self.servers)
            except RunError:
                if not is_new or not any(server.process is not None and server.problem for server in self.servers):
                    raise
                self.num_failures = max(self.num_failures, 1)
                self._recover()
                self._publish(self.servers)
        except BaseException:  # a stop, too
            self.version = self.proven_version = -1
            self.num_failures = 0  # whoever goes on all the same, as a notebook may, begins anew
            raise
        self.proven_version = version
        if self.adapters:
            loop.run(self.adapters.unload_all_but(self._label_of(version), self.servers))

    def _recover(self) -> None:
        """See that servers with a problem have the present weights again; RunError where that cannot be.

        Of this run's own servers those that have ended, or do not answer, are started anew; after a second failure
        without a new completion all that have a problem are.
        """
        failed = [server for server in self.servers if server.problem]
        if not failed:
            return
        self.num_failures += 1
        if self.num_failures >= _MOST_FAILURES:
            problem = f"{failed[0].problem}{failed[0].log_end()}"
            raise RunError(f"no response in {self.num_failures} attempts: {problem}")
        self.counts["retries"] += 1
        for place, server in enumerate(self.servers):
            process = server.process if server.problem else None
            if process is not None and (self.num_failures > 1 or not self._is_well(server)):
                self.counts["restarts"] += 1
                server.end()
                self.servers[place] = self._start(place)
            server.problem, server.num_recoveries = "", server.num_recoveries + 1
        try:  # no others: what they have under way must not go on with weights that are no policy's
            self._make_ready([new for new in self.servers if not new.about])
        except UserError as error:
            raise RunError(str(error)) from None
        self._publish([new for new in self.servers if new in failed or not new.label])

    def _is_well(self, server: Server) -> bool:
        """Tell whether a server of this run's own has not ended, and answers."""
        if server.process is None or server.process.has_ended(_END_SECONDS):
            return False
        try:
            loop.run(server.ask(HEALTH))
            return True
        except (NoAnswerError, RefusedError):
            return False

    def close(self) -> None:
        """End the servers that this run has started."""
        for server in self.servers:
            server.end()
        if self.adapters:
            self.adapters.close()
        loop.start(self.client.aclose()).result()

    def _start(self, number: int) -> Server:
        return start_server(self._api, self.client, self._hosts[number], number=number, **self._options)

    def _make_ready(self, servers: Sequence[Server], *, seconds: float | None = None) -> None:
        """Wait until they answer, and see that replacing their weights changes what they compute.

        The weights that they get first are no policy's. Without that, a server that keeps what it has would pass for
        one that takes what it gets for as long as the policy has changed little.
        """
        longest, limit = self._options["max_length"], seconds or self._settings.start_seconds
        loop.run(loop.all_of([own.wait_until_ready(limit, max_length=longest) for own in servers]))
        for server in servers:
            if (dtype := server.about["engine dtype"]) != (expected := self._options["dtype"]):
                what = f"it computes in {dtype}, and gspo expects {expected}"
                raise UserError(what, where=server.name, fix=f"set rollout.{self._api.name}.dtype={dtype}")
        if len(versions := {server.about["engine version"] for server in self.servers if server.about}) > 1:
            what = f"servers of {self._api.name} {' and '.join(sorted(versions))}, which would sample other numbers"
            raise UserError(what, where=f"rollout.{self._api.name}.urls", fix="start all of one version")
        gaps = self._hand_over(servers, f"{self._run_name}-scrambled", self._weights(scrambled=True))
        for server, gap in zip(servers, gaps, strict=True):
            server.gap_of_other_weights, server.has_had_policy = gap.mean, False
        if servers and self._beneath is not None:
            with with_adapter(self._model, self._beneath):
                gaps = self._hand_over(servers, self.base or f"{self._run_name}-base", self._weights())
            for server, gap in zip(servers, gaps, strict=True):
                self._check(server, gap)
            self._probe.rounding = max(gap.mean for gap in gaps)

    def _see_who_was_restarted(self) -> None:
        """Make ready anew each of somebody else's servers that does not have the weights which it was given last."""

        async def label_of(server: Server) -> str:
            try:
                request = Request(path=self._api.label_path, seconds=_PROBE_SECONDS)  # it may be busy
                return str((await server.ask(request))["weight_version"])
            except (NoAnswerError, RefusedError, KeyError, TypeError):
                return ""

        given = [server for server in self.servers if server.process is None and server.label]
        labels = loop.run(loop.all_of(map(label_of, given)))
        expected = [self.base or server.label for server in given]
        if others := [server for server, has, had in zip(given, labels, expected, strict=True) if has != had]:
            self._make_ready(others)

    def _publish(self, servers: Sequence[Server]) -> None:
        started, label = time.monotonic(), self._label_of(self.version)
        self._see_who_was_restarted()
        weights = self.adapters.ready(label) if self.adapters else self._weights()
        for server, gap in zip(servers, self._hand_over(servers, label, weights, base=self.base), strict=True):
            self.gap = gap
            self._check(server, gap)
            server.label = label
        self.publish_seconds += time.monotonic() - started

    def _check(self, server: Server, gap: Gap) -> None:
        """Raise RunError where a server has not got what it was given."""
        problem = "" if gap.is_closed else f"does not have the policy's weights, though it has taken them: {gap}"
        others = server.gap_of_other_weights
        if not problem and not server.has_had_policy and others < _MIN_RATIO * gap.mean:
            problem = f"computes the same with other weights, mean gap {others:.2g}, as with these: {gap}"
        if problem:
            fix = f"use a version of {self._api.name} that docs/engines.md names; nothing was sampled with these"
            raise RunError(f"{server.name} {problem}\n  fix: {fix}")
        server.has_had_policy = True

    def _hand_over(
        self, servers: Sequence[Server], label: str, weights: AbstractContextManager[HandOver], *, base: str = ""
    ) -> list[Gap]:
        """Give servers other weights, or another adapter to those of a base, and measure the gap of each."""
        asked = self._probe.requests(label, seed=secrets.randbelow(2**32), base=base)

        async def prove(server: Server, hand_over: HandOver) -> list[Completion]:
            try:
                await hand_over(server, label)
                samples = (server.ask(self._api.sample(own), seconds=_PROBE_SECONDS) for own in asked)
                answers = await asyncio.gather(*samples)
                return [self._api.read(answer, own)[0] for answer, own in zip(answers, asked, strict=True)]
            except (NoAnswerError, RefusedError, BadAnswerError) as error:
                server.problem = str(error) if isinstance(error, NoAnswerError) else ""
                what = f"{server.name} does not take the policy's weights: {error}{server.log_end()}"
                raise RunError(what) from None

        with weights as hand_over:
            proofs = loop.run(loop.all_of([prove(server, hand_over) for server in servers]))
            return [self._probe.gap(completions) for completions in proofs]
