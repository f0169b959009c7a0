"""Rollouts by an agent: a program that asks for completions as it likes, all of which are one response."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from gspo.errors import UserError
from gspo.model.packing import join_experts
from gspo.model.policy import Policy
from gspo.queries.bridge import behind
from gspo.queries.render import CUT
from gspo.queries.template import HOLE
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.conversation import merged
from gspo.rollout.dialects import Answer, RefusedError, Request, answer_of
from gspo.rollout.keys import number_of
from gspo.rollout.segments import Continuation, text_and_segments
from gspo.rollout.single_turn import Generate, SingleTurn
from gspo.rollout.tools import Agent, Result, Tools
from gspo.types import Failure, FinishReason, Messages, Query, Sample, Turn


@dataclass(kw_only=True, eq=False)
class _Piece:
    """A context and what follows it: turns of the policy, and what the agent has put between them."""

    last: int  # the number of the request that its last turn answers
    told: Messages = field(default_factory=list)  # with that turn
    text: str = ""  # of the tokens
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of the policy's turns, each with all before it as its prompt
    turns: list[Turn] = field(default_factory=list)


class AgentRollout:
    """Rollouts by the recipe's agent: `await rollout(query, generate)` is one Sample, of a piece for each context."""

    def __init__(self, policy: Policy, settings: RolloutConfig, tools: Tools, agent: Agent) -> None:
        self._policy, self._settings, self._tools, self._agent = policy, settings, tools, agent
        self._given = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}

    async def __call__(self, query: Query, generate: Generate) -> Sample:
        """Call the agent with the row; what it returns is the reward. RefusedError never leaves it."""
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
    """What the policy has written for an agent so far, with the tokens that it was sampled behind."""

    def __init__(self, policy: Policy, settings: RolloutConfig, tools: Tools, query: Query, generate: Generate) -> None:
        self._policy, self._settings, self._bridge = policy, settings, tools.bridge
        self._query, self._generate = query, generate
        self._pieces, self._asked = list[_Piece](), Counter[tuple[int, ...]]()
        self._num_requests, self._num_tokens = 0, 0  # that are answered, and that the policy has written
        self._turn = asyncio.Lock()  # one request after the other: each has what the others have left
        self._over: FinishReason | None = None  # a request was refused for this limit
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
        try:
            marked = self._bridge.rendered(request.messages, request.tools)
        except (UserError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError(f"messages: {error}") from None
        piece, context, text = self._place(request, marked)
        ids = (*(piece.ids if piece else ()), *context)
        room = min(settings.max_new_tokens - self._num_tokens, request.most or settings.max_new_tokens)
        if self._num_requests == settings.max_turns:
            self._over = "turns"
            raise RefusedError(f"{settings.max_turns} requests have been answered (rollout.max_turns)")
        if room < 1 or len(ids) >= settings.max_context:
            self._over = "length"
            limit = "rollout.max_new_tokens, in all" if room < 1 else f"rollout.max_context; these are {len(ids)}"
            raise RefusedError(f"context_length_exceeded: there are no more tokens ({limit})")
        self._num_requests += 1
        number, room = self._num_requests, min(room, settings.max_context - len(ids))
        self._asked[ids] += 1
        # Not the number of the request, which depends on when others come.
        turn = 1 + number_of([*ids, self._asked[ids]])
        generate = partial(self._generate, turn=turn, max_new_tokens=room)
        strings = (*settings.stop_strings, *request.stop)
        rollout = SingleTurn(self._policy, settings.model_copy(update={"stop_strings": strings}))
        sample = await rollout(replace(self._query, prompt_ids=ids), generate)
        self._num_tokens += sample.num_tokens
        counts = {"num_read": len(ids), "num_written": sample.num_tokens}
        is_cut = sample.finish_reason == "length"
        answer = answer_of(sample.text, is_cut=is_cut, has_tools=bool(request.tools), **counts)
        if piece is None:
            piece = _Piece(last=number)
            self._pieces.append(piece)
        self._add(piece, context, text, sample)
        piece.last, piece.told = number, [*map(_told, request.messages), _told(_message(answer))]
        return answer

    def _add(self, piece: _Piece, context: Sequence[int], text: str, sample: Sample) -> None:
        """Append a context and the policy's turn behind it."""
        num_calls = sample.text.count("<tool_call>")
        said = Turn(role="assistant", text=sample.text, num_tokens=sample.num_tokens, num_calls=num_calls)
        piece.turns += [Turn(role="user", text=text, num_tokens=len(context)), said]
        piece.ids += context
        written = sample.token_ids.tolist()
        piece.text += text + Continuation(self._policy.tokenizer, piece.ids)(written)
        piece.ids += written
        piece.mask += [False] * len(context) + [True] * len(written)
        piece.samples.append(sample)

    def _place(self, request: Request, marked: str) -> tuple[_Piece | None, list[int], str]:
        """The piece that the request goes on with, if any, and the tokens and the text between them.

        It is one whose text the conversation begins with. Where the agent has changed nothing, and the template has,
        rollout.history says what becomes of it.
        """
        text = marked.replace(CUT, "")
        for piece in sorted(self._pieces, key=lambda piece: -len(piece.text)):
            if text.startswith(piece.text):
                return piece, *self._between(piece, behind(marked, len(piece.text)))
        told, history = [*map(_told, request.messages)], self._settings.history
        same = [piece for piece in self._pieces if told[: len(piece.told)] == piece.told]
        if same and history == "refuse":
            what = "the chat template writes an earlier turn in another way than it was sampled"
            fix = "set rollout.history: branch or append"
            raise UserError(what, where=f"rollout.history, row {self._query.id}", fix=fix)
        if same and history == "append":
            piece = max(same, key=lambda piece: len(piece.told))
            messages, place = [*request.messages], len(piece.told) - 1
            messages[place] = {"role": "assistant", "content": HOLE}
            rest = self._bridge.rendered(messages, request.tools).rpartition(HOLE)[2]
            end = self._policy.tokenizer.decode(piece.ids[-1:]) if piece.samples[-1].finish_reason == "stop" else ""
            return piece, *self._between(piece, rest.removeprefix(end))
        return None, self._bridge.encoded(marked), text

    def _between(self, piece: _Piece, marked: str) -> tuple[list[int], str]:
        end = self._policy.tokenizer.decode(piece.ids[-1:])
        return self._bridge.encoded(marked, end), marked.replace(CUT, "")

    async def sample(self, result: Result) -> Sample:
        """Everything as one sample, with what the agent has returned."""
        failure, reward = result.failure, float(result.text) if result.text else None
        if self._over and failure is not None and failure.kind == "raised":
            failure, reward = None, 0.0  # the policy has used up what it had, and the agent does not say so
        if not self._pieces:  # something must be there that can be masked
            failure = failure or Failure(kind="raised", message="the agent has asked for no completion")
            rollout = SingleTurn(self._policy, self._settings)
            sample = await rollout(self._query, partial(self._generate, max_new_tokens=1))
            return replace(sample, failure=failure)
        pieces = sorted(self._pieces, key=lambda piece: piece.last)
        samples = [sample for piece in pieces for sample in piece.samples]
        ids = [token for piece in pieces for token in piece.ids]
        full = [each for sample in samples if (each := sample.full_logprobs) is not None]
        experts = [own for piece in pieces if (own := piece.samples[-1].experts) is not None]
        return replace(
            samples[-1],
            query=self._query,
            token_ids=torch.tensor(ids, dtype=samples[0].token_ids.dtype),
            loss_mask=torch.tensor([is_written for piece in pieces for is_written in piece.mask]),
            starts=(0, *accumulate(len(piece.ids) for piece in pieces[:-1])),
            text=text_and_segments(ids, self._query.prompt_ids, self._policy, None)[0],
            finish_reason=self._over or samples[-1].finish_reason,
            sampler_logprobs=torch.cat([sample.sampler_logprobs for sample in samples]),
            full_logprobs=torch.cat(full) if len(full) == len(samples) else None,
            versions=tuple(merged([span for sample in samples for span in sample.versions])),
            experts=join_experts(experts, is_own=True) if len(experts) == len(pieces) else None,
            turns=tuple(turn for piece in pieces for turn in piece.turns),
            failure=failure,
            environment_reward=reward,
        )


def _message(answer: Answer) -> dict[str, Any]:
    calls = [{"function": dict(call)} for call in answer.calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message says, in whatever form."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"role": message.get("role"), "text": text, "calls": [(own["name"], own["arguments"]) for own in calls]}
