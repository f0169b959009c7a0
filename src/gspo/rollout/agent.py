"""Rollouts by an agent: a program that asks for completions as it likes, all of which are one response."""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum
from typing import Any

from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.queries.render import CUT
from gspo.queries.template import HOLE
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.conversation import Written, departure, joined
from gspo.rollout.dialects import Answer, RefusedError, Request, answer_of
from gspo.rollout.keys import number_of
from gspo.rollout.single_turn import Generate, SingleTurn
from gspo.rollout.tools import Agent, Result, Tools
from gspo.types import Failure, FinishReason, Query, Sample, Turn

_ID = 32  # characters of an answer's id, behind what a dialect begins it with


@dataclass(kw_only=True, eq=False)
class _Piece(Written):
    """A context and what follows it: turns of the policy, and what the agent has put between them."""

    last: int  # the number of the request that its last turn answers
    told: list[Any] = field(default_factory=list)  # the tools and the messages of that request, and the turn


class AgentRollout:
    """Rollouts by the recipe's agent: `await rollout(query, generate)` is one Sample, of a piece for each context."""

    def __init__(self, policy: Policy, settings: RolloutConfig, tools: Tools, agent: Agent) -> None:
        self._policy, self._settings, self._tools, self._agent = policy, settings, tools, agent
        self._given = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}

    async def __call__(self, query: Query, generate: Generate) -> Sample:
        """Have the agent play the row; what it returns is the reward."""
        recording = Recording(self._policy, self._settings, self._tools, query, generate)
        async with self._agent.endpoint.session(recording.answer, self._given) as (base_url, api_key):
            row = {"prompt": query.prompt, **query.columns}
            running = asyncio.ensure_future(self._agent.run(row, base_url, api_key))
            both: set[asyncio.Future[Any]] = {running, recording.failed}
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                running.cancel()  # it has ended, or must
        if recording.failed.done():
            raise recording.failed.result()
        return await recording.sample(await running)


class Recording:
    """The record of what the policy has written for an agent, with the tokens that it was sampled behind."""

    def __init__(self, policy: Policy, settings: RolloutConfig, tools: Tools, query: Query, generate: Generate) -> None:
        self._policy, self._settings, self._bridge = policy, settings, tools.bridge
        self._query, self._generate = query, generate
        self._pieces, self._asked = list[_Piece](), Counter[tuple[int, ...]]()
        self._num_requests, self._num_tokens = 0, 0  # that are answered, and that the policy has written
        self._turn = asyncio.Lock()  # one request after the other: each has what the others have left
        self._answers = dict[str, tuple[_Piece, int]]()  # by its id, where the turn of each is
        self._over: FinishReason | None = None  # the recipe's limit for which the last request was cut or refused
        self._said = set[str]()  # the policy's own messages
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()  # what ends the rollout

    async def answer(self, request: Request) -> Answer:
        """The policy's message; RefusedError with the reason why there is none."""
        try:
            async with self._turn:
                return await self._answer(request)
        except RefusedError:
            raise
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise RefusedError(f"the trainer cannot sample: {error}") from error

    async def _answer(self, request: Request) -> Answer:
        settings = self._settings
        if not request.messages or request.messages[-1].get("role") == "assistant":
            raise RefusedError("the last message is the assistant's, or there is none: give what it is to answer")
        piece, context, marked = self._place(request)
        ids = (*(piece.ids if piece else ()), *context)
        room = self._room(len(ids))
        # Not the number of the request, which depends on when others come.
        turn, most = 1 + number_of([*ids, self._asked[ids]]), min(room, request.most or room)
        generate = partial(self._generate, turn=turn, max_new_tokens=most)
        strings = (*settings.stop_strings, *request.stop)
        rollout = SingleTurn(self._policy, settings.model_copy(update={"stop_strings": strings}))
        sample = await rollout(replace(self._query, prompt_ids=ids), generate)
        self._num_requests += 1  # those that were given up before do not count
        self._num_tokens += sample.num_tokens
        self._asked[ids] += 1
        is_cut = sample.finish_reason == "length"
        self._over = "length" if is_cut and most == room else None
        answer = answer_of(sample, request, num_read=len(ids), tokenizer=self._policy.tokenizer)
        self._said.add(answer.content)
        if piece is None:
            piece = _Piece(last=self._num_requests)
            self._pieces.append(piece)
        num_calls = max(len(answer.calls), sample.text.count("<tool_call>"))
        self._add(piece, context, marked, sample, num_calls)
        self._answers[answer.id] = piece, len(piece.turns) - 1
        piece.last, piece.told = self._num_requests, [*_told(request), _comparable(_message(answer))]
        return answer

    def _room(self, num_read: int) -> int:
        """Return how many tokens the policy may write; RefusedError where it may write none."""
        settings = self._settings
        if self._num_requests == settings.max_turns:
            self._over = "turns"
            raise RefusedError(f"{settings.max_turns} requests have been answered (rollout.max_turns)")
        room = min(settings.max_new_tokens - self._num_tokens, settings.max_context - num_read)
        if room < 1:
            self._over = "length"
            limits = f"{self._num_tokens} are written (rollout.max_new_tokens), {num_read} read (rollout.max_context)"
            raise RefusedError(f"context_length_exceeded: there are no more tokens: {limits}")
        return room

    def _add(self, piece: _Piece, context: Sequence[int], marked: str, sample: Sample, num_calls: int) -> None:
        """Append a context and the policy's turn behind it."""
        counts = {"num_tokens": sample.num_tokens, "num_calls": num_calls, "number": self._num_requests}
        said = Turn(role="assistant", text=sample.text, **counts)
        piece.turns += [Turn(role="user", text=marked.replace(CUT, ""), num_tokens=len(context)), said]
        piece.read(context, marked)
        piece.write(sample, self._policy.tokenizer)

    def _place(self, request: Request) -> tuple[_Piece | None, list[int], str]:
        """The piece that the request goes on with, if any, and the tokens and the marked text between them.

        It is one whose text the conversation begins with. Where the agent has changed nothing, and the template has,
        rollout.history says what becomes of it. RefusedError for messages that the template does not take.
        """
        try:
            marked = self._bridge.rendered(request.messages, request.tools, self._said)
            context = self._bridge.encoded(marked)
        except Exception as error:  # whatever a template or a tokenizer makes of what an agent may say
            raise RefusedError(str(error)) from None
        for piece in sorted(self._pieces, key=lambda piece: -len(piece.marked)):
            if marked.startswith(piece.marked):
                return piece, *self._between(piece, marked[len(piece.marked) :])
        told, history = _told(request), self._settings.history
        same = [piece for piece in self._pieces if told[: len(piece.told)] == piece.told]
        last = max(same, key=lambda piece: len(piece.told), default=None)
        if last is not None and history == "refuse":
            raise departure(last.marked, marked, self._query)
        if last is not None and history == "append":
            hole, messages = f"{HOLE}{secrets.token_hex(4)}", [*request.messages]
            messages[len(last.told) - 2] = {"role": "assistant", "content": hole}
            with suppress(UserError):  # the template may want the calls
                rest = self._bridge.rendered(messages, request.tools, {hole, *self._said}).partition(hole)[2]
                end = self._policy.tokenizer.decode(last.ids[-1:])
                return last, *self._between(last, rest.removeprefix(end))
        return None, context, marked

    def _between(self, piece: _Piece, marked: str) -> tuple[list[int], str]:
        return self._bridge.encoded(marked, self._policy.tokenizer.decode(piece.ids[-1:])), marked

    async def sample(self, result: Result) -> Sample:
        """Everything as one sample, with what the agent has returned."""
        failure, reward = result.failure, self._reward(json.loads(result.text)) if result.text else None
        if isinstance(reward, Failure):
            failure, reward = reward, None
        if self._over and failure is not None and failure.kind == "raised":
            failure, reward = None, 0.0  # the policy has used up what it had, and the agent does not say so
        if not self._pieces:  # something must be there that can be masked
            failure = failure or Failure(kind="raised", message="the agent has asked for no completion")
            rollout = SingleTurn(self._policy, self._settings)
            sample = await rollout(self._query, partial(self._generate, max_new_tokens=1))
            return replace(sample, failure=failure)
        pieces = sorted(self._pieces, key=lambda piece: piece.last)
        return joined(
            self._policy,
            self._query,
            pieces,
            is_own=True,
            finish_reason=self._over or "stop",
            failure=failure,
            environment_reward=reward,
        )

    def _reward(self, given: float | Mapping[str, float]) -> float | Failure | None:
        """The response's reward: what the agent has given it, or its turns in all, each of which has its own then."""
        if not isinstance(given, Mapping):
            return given
        for name, reward in given.items():
            if (answer := self._answers.pop(name[-_ID:], None)) is None:
                what = f"the agent gives a reward to {name[:60]!r}, which is the id of no completion that has none yet"
                return Failure(kind="invalid", message=what)
            piece, place = answer
            piece.turns[place] = replace(piece.turns[place], reward=reward)
        return fsum(given.values()) if given else None


def _message(answer: Answer) -> dict[str, Any]:
    calls = [{"function": dict(call)} for call in answer.calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def _told(request: Request) -> list[Any]:
    """The tools, and what each message says, in whatever form."""
    return [[*request.tools], *map(_comparable, request.messages)]


def _comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"role": message.get("role"), "text": text, "calls": [(own["name"], own["arguments"]) for own in calls]}
