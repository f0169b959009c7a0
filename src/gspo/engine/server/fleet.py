"""The servers of a run: started or found, given the policy's weights, proven to have them, and looked after."""

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gspo import loop
from gspo.engine.engine import Completion
from gspo.engine.server.api import BadAnswerError, ServerApi
from gspo.engine.server.probe import Gap, Probe
from gspo.engine.server.ray_host import Host
from gspo.engine.server.server import NoAnswerError, RefusedError, Server, new_client, start_server
from gspo.engine.server.settings import TRANSFERS
from gspo.engine.server.vllm_transfer import Transfer
from gspo.engine.server.weights import HandOver, by_files
from gspo.errors import RunError, UserError
from gspo.model.policy import Policy
from gspo.recipe.sections import ServerConfig

KEY_VARIABLE = "GSPO_ENGINE_KEY"
_MOST_FAILURES = 3  # attempts in a row without a new response
_END_SECONDS = 2.0  # until a server that is lost has ended
_MIN_RATIO = 3.0  # of the gap that others than the policy's weights have to that of the policy's
_PROBE_SECONDS = 120.0
_FOUND_SECONDS = 30.0  # in which a server that runs already must answer


class Fleet:
    """One server or several, all with the same weights, which a label names."""

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
        self._dtype, self._max_length = dtype, max_length
        if settings.weights in TRANSFERS:
            self._weights = Transfer(policy, settings.weights).ready
        else:
            self._weights = partial(by_files, policy, settings.weights_dir)
        self._run_name = secrets.token_hex(4)  # part of each label, so that no other run's weights pass for this one's
        key = os.environ.get(KEY_VARIABLE, "") if settings.urls else secrets.token_urlsafe(32)
        if not key.isascii():
            raise UserError("it is not ASCII, as a header of HTTP is", where=KEY_VARIABLE, fix="set another key")
        model = (directory / f"{api.name}_model").absolute()
        self._options: dict[str, Any] = {"model": model, "max_length": max_length, "dtype": dtype}
        self._options |= {"kind": policy.device.type, "directory": directory, "key": key}
        self.version = -1  # none is published yet
        self.proven_version = -1  # that all servers have had, at the least
        self.num_failures = 0  # recoveries in a row without a new completion
        self.counts: Counter[str] = Counter()  # since they were taken last
        self.publish_seconds = 0.0
        self.gap: Gap | None = None  # of the last proof
        self.servers: list[Server] = []
        self._client = new_client()
        try:
            say(f"{'starting' if hosts else 'looking for'} {api.name}")
            if hosts:
                policy.model.config.architectures = [policy.architecture]
                policy.model.config.save_pretrained(model)
                policy.tokenizer.save_pretrained(model)
            for url in settings.urls:
                name = f"server at {url}"
                self.servers.append(Server(name=name, api=api, client=self._client, url=url, key=key))
            for number in range(len(hosts)):
                self.servers.append(self._start(number))
            seconds = min(_FOUND_SECONDS, settings.start_seconds) if settings.urls else settings.start_seconds
            self._make_ready(self.servers, seconds)
        except BaseException as error:
            self.close()
            if type(error) is not RunError:
                raise
            fix = f"use a server of the policy's model, and a version of {api.name} that docs/engines.md names"
            raise UserError(str(error), where=f"rollout.{api.name}", fix=fix) from None  # nothing has been done yet

    @property
    def label(self) -> str:
        """The name of the weights that the servers must have."""
        return self._label_of(self.version)

    def versions(self, since: int) -> dict[str, int]:
        """By their labels, the versions from one on that can be at work: up to the one that is published last."""
        return {self._label_of(version): version for version in range(since, self.version + 1)}

    def _label_of(self, version: int) -> str:
        return f"{self._run_name}-{version}"

    def publish(self, version: int) -> None:
        """Hand the policy's present weights to all servers, and prove each; RunError where one has others.

        A version that they have is handed to those alone that have failed.
        """
        is_for_all, self.version = version != self.version, version
        problem = next((server.problem for server in self.servers if server.problem), "")
        try:
            while problem or is_for_all:
                failed = self._recover(problem) if problem else []
                try:
                    self._publish(self.servers if is_for_all else failed)
                    break
                except RunError as error:
                    if not any(server.process is not None and server.problem for server in self.servers):
                        raise
                    problem, is_for_all = str(error), True
                    self.num_failures = max(self.num_failures, 1)
        except BaseException:  # a stop, too; whoever goes on all the same, as a notebook may, begins anew
            self.version, self.proven_version, self.num_failures = -1, -1, 0
            raise
        self.proven_version = version

    def close(self) -> None:
        """End the servers that this run has started."""
        for server in self.servers:
            if server.process is not None:
                server.process.end()
        loop.start(self._client.aclose()).result()

    def _recover(self, problem: str) -> list[Server]:
        """Make servers with a problem ready again, and return them; RunError where that cannot be.

        Of this run's own servers those that have ended, or do not answer, are started anew; after a second failure
        without a new completion all that have a problem are.
        """
        self.num_failures += 1
        places = [place for place, server in enumerate(self.servers) if server.problem]
        if self.num_failures >= _MOST_FAILURES:
            log_end = self.servers[places[0]].log_end()
            raise RunError(f"no response in {self.num_failures} attempts: {problem}{log_end}")
        self.counts["retries"] += 1
        for place in places:
            server = self.servers[place]
            server.mend()
            if server.process is None:
                continue
            has_ended = server.process.has_ended(_END_SECONDS)
            if self.num_failures > 1 or has_ended or not loop.run(server.is_well()):
                self.counts["restarts"] += 1
                server.process.end()
                self.servers[place] = self._start(place)
        try:  # no others: what they have under way must not go on with weights that are no policy's
            self._make_ready([new for new in self.servers if not new.about], self._settings.start_seconds)
        except UserError as error:
            raise RunError(str(error)) from None
        return [self.servers[place] for place in places]

    def _start(self, number: int) -> Server:
        return start_server(self._api, self._hosts[number], self._client, number=number, **self._options)

    def _make_ready(self, servers: Sequence[Server], seconds: float) -> None:
        """Wait until they answer, and see that replacing their weights changes what they compute.

        The weights that they get first are no policy's. Without that, a server that keeps what it has would pass for
        one that takes what it gets for as long as the policy has changed little.
        """
        loop.run(loop.all_of(own.wait_until_ready(seconds, max_length=self._max_length) for own in servers))
        for server in servers:
            if (dtype := server.about["engine dtype"]) != self._dtype:
                what = f"it computes in {dtype}, and gspo expects {self._dtype}"
                raise UserError(what, where=server.name, fix=f"set rollout.{self._api.name}.dtype={dtype}")
        if len(versions := {server.about["engine version"] for server in self.servers if server.about}) > 1:
            what = f"servers of {self._api.name} {' and '.join(sorted(versions))}, which would sample other numbers"
            raise UserError(what, where=f"rollout.{self._api.name}.urls", fix="start all of one version")
        gaps = self._hand_over(servers, label=f"{self._run_name}-scrambled", scrambled=True)
        for server, gap in zip(servers, gaps, strict=True):
            server.gap_of_other_weights = gap.mean

    def _publish(self, servers: Sequence[Server]) -> None:
        started = time.monotonic()
        for server, gap in zip(servers, self._hand_over(servers, label=self.label), strict=True):
            self.gap = gap
            problem = "" if gap.is_closed else f"does not have the policy's weights, though it has taken them: {gap}"
            others = server.gap_of_other_weights
            if not problem and not server.has_had_policy and others < _MIN_RATIO * gap.mean:
                problem = f"computes the same with other weights, mean gap {others:.2g}, as with these: {gap}"
            if problem:
                fix = f"use a version of {self._api.name} that docs/engines.md names; nothing was sampled with these"
                raise RunError(f"{server.name} {problem}\n  fix: {fix}")
            server.has_had_policy = True
        self.publish_seconds += time.monotonic() - started

    def _hand_over(self, servers: Sequence[Server], *, label: str, scrambled: bool = False) -> list[Gap]:
        """Replace the weights of servers, which sample nothing at this time, and measure the gap of each."""
        asked = self._probe.requests(label, seed=secrets.randbelow(2**32))

        async def prove(server: Server, hand_over: HandOver) -> list[Completion]:
            try:
                await hand_over(server, label)
                answers = await asyncio.gather(
                    *(server.ask(self._api.sample(own), seconds=_PROBE_SECONDS) for own in asked)
                )
                return [self._api.read(answer, own)[0] for answer, own in zip(answers, asked, strict=True)]
            except (NoAnswerError, RefusedError, BadAnswerError) as error:
                server.problem = str(error) if isinstance(error, NoAnswerError) else ""
                what = f"{server.name} does not take the policy's weights: {error}{server.log_end()}"
                raise RunError(what) from None

        with self._weights(scrambled=scrambled) as hand_over:
            proofs = loop.run(loop.all_of(prove(server, hand_over) for server in servers))
        return [self._probe.gap(completions) for completions in proofs]
