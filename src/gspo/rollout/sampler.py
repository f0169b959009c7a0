"""From queries to groups of samples, by an engine that knows tokens alone."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from gspo import loop
from gspo.engine.engine import Completion, Engine, LostError, Prompt, Sampling, Session
from gspo.loop import all_of
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.agent import AgentRollout
from gspo.rollout.conversation import Conversation
from gspo.rollout.keys import SamplingKey, key_of_turn, number_of
from gspo.rollout.shaping import biased_ids
from gspo.rollout.single_turn import SingleTurn
from gspo.rollout.tools import Tools
from gspo.types import Group, Query, Sample, ShowProgress

GRACE_SECONDS = 1.0  # after which what agents have asked for is sampled, without those that have not asked
Rollout = SingleTurn | Conversation | AgentRollout


class Ended:
    """The number of responses that have ended, for a display."""

    def __init__(self, engine: Engine) -> None:
        self.num, self.total = 0, 0
        self._engine, self._num_before, self._started = engine, engine.num_tokens, monotonic()

    def shown(self) -> tuple[int, int, str]:
        """Return how many, of how many, and of what."""
        num_tokens = self._engine.num_tokens - self._num_before
        rate = num_tokens / max(monotonic() - self._started, 1e-9)
        return min(self.num, self.total), self.total, f"responses, {num_tokens:,} tokens ({rate:,.0f} a second)"


@dataclass(kw_only=True, eq=False)
class _Waiting:
    prompt: Prompt
    sampling: Sampling
    promise: asyncio.Future[Future[Completion]]
    order: tuple[bool, int, int] = (False, 0, 0)  # among those that are submitted together


class Sampler:
    """The sampler, which asks an engine for groups.

    Example: Sampler(EmbeddedEngine(policy), policy).sample(queries, settings, SamplingKey(seed=0, step=1))
    """

    def __init__(self, engine: Engine, policy: Policy, tools: Tools | None = None) -> None:
        self.engine, self._policy, self._tools = engine, policy, tools
        self._version, self._num_groups = 0, 0
        self._num_came = 0  # prompts
        self._num_under_way = 0  # responses that wait for the others: see _is_in_step
        # Prompts to be submitted together, and who waits for the engine's promise of a completion.
        self._waiting: list[_Waiting] = []
        self._made: tuple[RolloutConfig, Rollout, Sampling] | None = None  # of the settings that were used last

    def publish(self, version: int | None = None) -> None:
        """Have the engine sample with the policy's present weights; without a version, a server that has lost them."""
        self._version = self._version if version is None else version
        self.engine.publish(self._version)

    def sample(
        self,
        queries: Sequence[Query],
        settings: RolloutConfig,
        key: SamplingKey,
        *,
        record_experts: bool = False,
        show_progress: ShowProgress = lambda *_: None,
    ) -> tuple[Group, ...]:
        """A group of `settings.group_size` responses to each query, in the order of the queries.

        A response's tokens depend on its query, its number and `key`, not on what is sampled at the same time. What a
        server fails to answer is asked for again. Stopped by a signal, it leaves the engine ready for the next call.
        `show_progress` is called with how many responses have ended, how many there will be, and what they are.
        """
        self.publish()
        groups: dict[int, Group] = {}
        ended, size = Ended(self.engine), settings.group_size
        keys, ended.total = key.of_groups([query.id for query in queries], size), len(queries) * size

        async def sample(number: int) -> None:
            query, own = queries[number], keys[number]
            with suppress(LostError):
                groups[number] = await self.group(query, settings, own, record_experts=record_experts, ended=ended)

        while missing := [number for number in range(len(queries)) if number not in groups]:
            loop.run(all_of([sample(number) for number in missing]), lambda: show_progress(*ended.shown()))
            if len(groups) < len(queries):
                self.publish()
        return tuple(groups[number] for number in range(len(queries)))

    async def group(
        self,
        query: Query,
        settings: RolloutConfig,
        keys: Sequence[int],
        *,
        record_experts: bool = False,
        ended: Ended | None = None,
    ) -> Group:
        """A response for each of the keys; LostError where a server has failed. `ended` counts responses."""
        rollout, sampling = self._rollout(settings)
        self._num_groups += 1
        group = self._num_groups
        sampling = replace(sampling, record_experts=record_experts)

        in_step = self._tools is not None and settings.is_in_trainer
        generate = partial(self._generate, sampling, in_step)

        async def sample(key: int) -> Sample:
            session = Session() if self._tools is not None else None  # for as long as the response is under way
            self._num_under_way += in_step  # not before: one that is cancelled before it begins is waited for by none
            try:
                made = await rollout(query, partial(generate, group, key, session, settings.max_new_tokens))
            finally:
                self._num_under_way -= in_step
                self._submit_soon(in_step)
            if ended is not None:
                ended.num += 1
            return made

        return Group(samples=tuple(await all_of([sample(key) for key in keys])))

    async def _generate(
        self,
        sampling: Sampling,
        in_step: bool,
        group: int,
        key: int,
        session: Session | None,
        most: int,
        ids: Sequence[int],
        is_complete: Callable[[int], bool] | None,
        *,
        turn: int = 0,
        max_new_tokens: int | None = None,
    ) -> Completion:
        """Return what the policy adds to the ids: prompts that come at the same moment are submitted together.

        Those that are `in_step` wait for the turns of all others: what is decoded side by side, on which the last bit
        of a likelihood depends, does not depend on how long tools take.
        """
        if turn:  # those of any responses with the same prompt share it
            group, key = number_of(ids), key_of_turn(key, turn)
        order = (bool(turn), group, key) if in_step else (False, 0, 0)
        max_new_tokens = most if max_new_tokens is None else max_new_tokens
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "is_complete": is_complete}
        prompt = Prompt(ids=tuple(ids), key=key, group=group, session=session, **limits)
        promise: asyncio.Future[Future[Completion]] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(prompt=prompt, sampling=sampling, promise=promise, order=order)
        self._waiting.append(waiting)
        self._submit_soon(in_step)
        self._num_came += 1
        if in_step and self._tools is not None and self._tools.agent is not None:  # agents may wait for each other
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._submit_late, self._num_came)
        try:
            return await asyncio.wrap_future(await promise)
        except asyncio.CancelledError:
            self._waiting = [each for each in self._waiting if each is not waiting]
            if promise.done() and not promise.cancelled():  # it has been submitted
                promise.result().cancel()
            raise

    def _submit_soon(self, in_step: bool) -> None:
        """Submit what waits, or if it is in step, once all responses under way wait."""
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._submit, in_step)

    def _submit_late(self, num_came: int) -> None:
        """Submit what waits if none has come since."""
        if num_came == self._num_came:
            self._submit(False)

    def _submit(self, in_step: bool) -> None:
        if in_step and len(self._waiting) < self._num_under_way:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda each: each.order), []
        waiting = [each for each in waiting if not each.promise.done()]  # some may have been given up
        try:
            while waiting:
                sampling = waiting[0].sampling
                alike = [each for each in waiting if each.sampling == sampling]
                futures = self.engine.submit([each.prompt for each in alike], sampling)
                for each, future in zip(alike, futures, strict=True):
                    each.promise.set_result(future)
                waiting = [each for each in waiting if each.sampling != sampling]
        except Exception as error:
            for each in waiting:
                each.promise.set_exception(error)

    def _rollout(self, settings: RolloutConfig) -> tuple[Rollout, Sampling]:
        """Return what samples with the settings."""
        if self._made is None or self._made[0] != settings:
            policy = self._policy
            sampling = Sampling(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p,
                repetition_penalty=settings.repetition_penalty,
                biases=biased_ids(settings.logit_bias, policy.tokenizer, len(policy.head.weight)),
                stop_ids=policy.stop_ids,
            )
            self._made = (settings, _rollout(policy, settings, self._tools), sampling)
        return self._made[1:]


def _rollout(policy: Policy, settings: RolloutConfig, tools: Tools | None) -> Rollout:
    if tools is None:
        return SingleTurn(policy, settings)
    agent = tools.agent
    return Conversation(policy, settings, tools) if agent is None else AgentRollout(policy, settings, tools, agent)
