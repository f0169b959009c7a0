"""Rollouts of several turns: the policy calls tools, or an environment answers it, until either has no more to say."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import fsum
from os.path import commonprefix
from typing import Any

import torch

from gspo.errors import UserError
from gspo.model.packing import join_experts
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.segments import Continuation, text_and_segments
from gspo.rollout.single_turn import Generate, SingleTurn
from gspo.rollout.tools import Tools
from gspo.types import Experts, Failure, FinishReason, Query, Sample, Turn


@dataclass(kw_only=True, eq=False)
class Written:
    """The turns of one context: what the policy wrote, and what stands between."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # which of them the policy wrote
    samples: list[Sample] = field(default_factory=list)  # of the policy's turns, each with all before it as its prompt
    turns: list[Turn] = field(default_factory=list)
    marked: str = ""  # the text, with marks as bridges make them

    def read(self, context: Sequence[int], marked: str) -> None:
        """Append what the policy only reads."""
        self.ids += context
        self.mask += [False] * len(context)
        self.marked += marked

    def write(self, sample: Sample, tokenizer: Any) -> None:
        """Append a turn of the policy's."""
        ids = sample.token_ids.tolist()
        self.marked += Continuation(tokenizer, sample.query.prompt_ids)(ids)
        self.ids += ids
        self.mask += [True] * sample.num_tokens
        self.samples.append(sample)


@dataclass(kw_only=True, eq=False)
class _Response:
    """A response under way."""

    query: Query
    pieces: list[Written]  # the first follows the prompt, the others have contexts of their own
    said: list[tuple[str, Sequence[str]]] = field(default_factory=list)  # turns, and what followed each
    num_tokens: int = 0  # behind the prompt, whatever stands in several contexts once
    is_compared: bool = False  # with what the template writes: not where the prompt has begun the first turn

    @property
    def ids(self) -> tuple[int, ...]:
        """All that the policy reads."""
        prompt_ids = self.query.prompt_ids if len(self.pieces) == 1 else ()
        return (*prompt_ids, *self.pieces[-1].ids)

    @property
    def num_taken(self) -> int:
        """The tokens that rollout.max_new_tokens limits; a template may also make a context longer than it was."""
        return max(self.num_tokens, len(self.ids) - len(self.query.prompt_ids))


class Conversation:
    """Rollouts of several turns: `await rollout(query, generate)` is one Sample, of the tokens that were sampled."""

    def __init__(self, policy: Policy, settings: RolloutConfig, tools: Tools) -> None:
        self._policy, self._settings, self._tools = policy, settings, tools
        if tools.bridge.call_ends_turn:
            settings = settings.model_copy(update={"stop_strings": (*settings.stop_strings, "</tool_call>")})
        self._single_turn = SingleTurn(policy, settings)

    async def __call__(self, query: Query, generate: Generate) -> Sample:
        """The response; the loss mask is false on what others say, and what the chat template writes around it."""
        session = uuid.uuid4().hex
        try:
            return await self._sample(query, generate, session)
        finally:
            await self._tools.end(session)

    async def _sample(self, query: Query, generate: Generate, session: str) -> Sample:
        settings, tools, response = self._settings, self._tools, _Response(query=query, pieces=[Written()])
        by_steps = tools.environment is not None and tools.environment.by_steps
        answered = self._step if by_steps else self._call_tools
        await self._begin(session, response)
        while True:
            room = settings.max_new_tokens - response.num_taken
            turn = partial(generate, turn=len(response.said), max_new_tokens=room)
            sample = await self._single_turn(replace(query, prompt_ids=response.ids), turn)
            response.num_tokens += sample.num_tokens
            written = response.pieces[-1]
            written.write(sample, self._policy.tokenizer)
            written.turns.append(Turn(role="assistant", text=sample.text, num_tokens=sample.num_tokens))
            is_over = await answered(session, response)
            if is_over is not None:
                break
        reason, failure = is_over
        reward = None
        if failure is None:  # else the environment may hang
            reward, failure = await tools.reward(session)
        given = [turn.reward for piece in response.pieces for turn in piece.turns if turn.reward is not None]
        if by_steps and (given or reason == "length"):  # a first turn that is cut off has earned nothing
            reward = fsum(given)
        return joined(
            self._policy,
            query,
            response.pieces,
            is_own=False,
            finish_reason=reason,
            failure=failure,
            environment_reward=reward,
            num_taken=response.num_taken if len(response.pieces) > 1 else None,
        )

    async def _begin(self, session: str, response: _Response) -> None:
        """Append what the environment says first, if there is one and it says something."""
        bridge, written, most = self._tools.bridge, response.pieces[-1], self._settings.max_new_tokens
        said = await self._tools.begin(session, response.query)
        opened = bridge.opened_text or ""
        response.is_compared = said is not None or response.query.text.endswith(opened)
        if said is not None:
            written.read(bridge.opening(said), opened)
            written.turns.append(Turn(role="user", text=said, num_tokens=len(written.ids)))
            response.num_tokens = len(written.ids)
        else:
            written.marked = opened
        if response.num_tokens >= most:
            what = f"what the environment says first has {len(written.ids)} tokens"
            fix = f"raise rollout.max_new_tokens, which is {most}"
            raise UserError(what, where=f"rollout.environment, row {response.query.id}", fix=fix)

    async def _call_tools(self, session: str, response: _Response) -> tuple[FinishReason, Failure | None] | None:
        """Make the calls of the last turn and append what they return; where the response is over, return why."""
        written = response.pieces[-1]
        sample = written.samples[-1]
        calls = self._tools.calls(sample) if sample.finish_reason == "stop" else []
        if not calls:
            return sample.finish_reason, None
        if len(response.said) + 1 == self._settings.max_turns:
            return "turns", None
        results = await self._tools.answers(session, calls)
        num_errors = sum(result.is_error for result in results)
        written.turns[-1] = replace(written.turns[-1], num_calls=len(calls), num_errors=num_errors)
        if failure := next((result.failure for result in results if result.failure), None):
            return "stop", failure
        return self._read([result.text for result in results], response)

    async def _step(self, session: str, response: _Response) -> tuple[FinishReason, Failure | None] | None:
        """Have the environment answer the last turn and append what it says; where the response is over, return why."""
        written = response.pieces[-1]
        sample = written.samples[-1]
        if sample.finish_reason != "stop":
            return sample.finish_reason, None
        answer = await self._tools.step(session, sample.text)
        if isinstance(answer, Failure):
            return "stop", answer
        said, reward, is_over = answer
        written.turns[-1] = replace(written.turns[-1], reward=reward)
        if is_over:
            return "stop", None
        if len(response.said) + 1 == self._settings.max_turns:
            return "turns", None
        return self._read([said[: self._settings.tool_characters]], response)

    def _read(self, texts: Sequence[str], response: _Response) -> tuple[FinishReason, None] | None:
        """Append what tools or the environment say; where it has no room, return so."""
        bridge, written, prompt_ids = self._tools.bridge, response.pieces[-1], response.query.prompt_ids
        last = written.ids[-1]
        marked = bridge.marked(texts, last=last)
        context = bridge.encoded(marked, bridge.tokenizer.decode([last]))
        response.said.append((written.turns[-1].text, texts))
        num_tokens = response.num_tokens + len(context)
        size, again = len(response.ids) + len(context), self._again(response)
        if again is not None:
            first, written = response.pieces[0], Written()
            before = [*prompt_ids, *first.ids[: first.mask.index(True)]]
            context, marked = bridge.written_again(before, again), again
            size = len(context)
        if max(num_tokens, size - len(prompt_ids)) >= self._settings.max_new_tokens:
            return "length", None
        response.num_tokens = num_tokens
        if again is not None:
            response.pieces.append(written)
        written.read(context, marked)
        written.turns.append(Turn(role=bridge.speaker, text="\n".join(texts), num_tokens=len(context)))
        return None

    def _again(self, response: _Response) -> str | None:
        """The text of a context of its own; None where the policy goes on behind what was sampled.

        UserError where the recipe refuses a template that writes it in another way.
        """
        history, sampled = self._settings.history, response.pieces[-1].marked
        if history == "append" or not response.is_compared:
            return None
        again = self._tools.bridge.again(response.said)
        if again is None or again.startswith(sampled):
            return None
        if history == "refuse":
            raise departure(sampled, again, response.query)
        return again


def departure(sampled: str, again: str, query: Query) -> UserError:
    """The error that names the place at which a template writes an earlier turn in another way than it was sampled."""
    place = len(commonprefix([sampled, again]))  # noqa: RUF071 - characters are meant
    here, there = (json.dumps(text[place : place + 40], ensure_ascii=False) for text in (sampled, again))
    what = f"the chat template writes an earlier turn in another way than it was sampled: {there} in place of {here}"
    fix = "set rollout.history: branch or append"
    return UserError(what, where=f"rollout.history, row {query.id}", fix=fix)


def joined(policy: Policy, query: Query, pieces: Sequence[Written], *, is_own: bool, **others: Any) -> Sample:
    """All turns of some contexts as one sample, with `others` of its fields; `is_own`: the prompt is in the first."""
    samples = [sample for piece in pieces for sample in piece.samples]
    ids = [token for piece in pieces for token in piece.ids]
    full = [each for sample in samples if (each := sample.full_logprobs) is not None]
    starts = [0, *accumulate(len(piece.ids) for piece in pieces[:-1])]
    return replace(
        samples[-1],
        query=query,
        token_ids=torch.tensor(ids, dtype=samples[0].token_ids.dtype),
        loss_mask=torch.tensor([is_written for piece in pieces for is_written in piece.mask]),
        text=text_and_segments(ids, query.prompt_ids, policy, None)[0],
        sampler_logprobs=torch.cat([sample.sampler_logprobs for sample in samples]),
        full_logprobs=torch.cat(full) if len(full) == len(samples) else None,
        versions=tuple(merged([span for sample in samples for span in sample.versions])),
        experts=_experts(pieces, None if is_own else len(query.prompt_ids)),
        turns=tuple(turn for piece in pieces for turn in piece.turns),
        starts=tuple(starts[not is_own :]),
        **others,
    )


def _experts(pieces: Sequence[Written], num_prompt_ids: int | None) -> Experts | None:
    """The experts of the whole response: the last pass of each piece has read all before it."""
    found = [experts for piece in pieces if (experts := piece.samples[-1].experts) is not None]
    if len(found) < len(pieces):
        return None
    if num_prompt_ids is not None:
        whole, size = torch.cat([found[0].prefix, found[0].row]), num_prompt_ids - 1
        found[0] = Experts(prefix=whole[:size], row=whole[size:])
    return join_experts(found, is_own=num_prompt_ids is None)


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans, those of one version that follow each other as one."""
    merged = list[tuple[int, int]]()
    for version, count in spans:
        if merged and merged[-1][0] == version:
            count += merged.pop()[1]
        merged.append((version, count))
    return merged
