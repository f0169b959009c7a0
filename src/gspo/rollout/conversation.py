"""Rollouts of several turns: the policy calls tools and reads their results, until it answers without a call."""

import json
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo.errors import UserError
from gspo.loop import all_of
from gspo.model.policy import Policy
from gspo.queries.bridge import Bridge
from gspo.recipe.callables import CLOSE, GET_REWARD, RESET
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.segments import text_and_segments
from gspo.rollout.single_turn import Generate, SingleTurn
from gspo.types import Experts, Failure, FinishReason, Query, Sample, Turn

_MAX_LEVELS = 100  # of nesting, in the arguments of a call
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a tool has returned.

    Example: Result(text="56088")
    """

    text: str
    is_error: bool = False  # which the policy may mend
    failure: Failure | None = None  # of what is not the policy's fault: there is no answer


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """A function that the policy may call.

    Example: await Tool(name="calculator", schema={…}, …).call("7", {"expression": "3 * 4"}) == Result(text="12")
    """

    name: str
    schema: Mapping[str, Any]  # as chat templates take it; empty for what the policy may not call
    call: Callable[[str, Mapping[str, Any]], Awaitable[Result]]  # of a session, which an environment keeps a state for
    function: Callable[..., Any]
    close: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools of a run, and how their results are written.

    Example: Tools(by_name={"calculator": calculator}, bridge=bridge)
    """

    by_name: Mapping[str, Tool]
    bridge: Bridge

    @property
    def shown(self) -> list[str]:
        """The names of those that the policy may call."""
        return [name for name, tool in self.by_name.items() if tool.schema]

    async def begin(self, session: str, query: Query) -> str | None:
        """Begin a response in the environment, if there is one: what it says first; UserError where it cannot begin."""
        if RESET not in self.by_name:
            return None
        result = await self.by_name[RESET].call(session, {"prompt": query.prompt, **query.columns})
        if problem := result.failure.message if result.failure else result.text if result.is_error else "":
            raise UserError(f"reset: {problem}", where=f"rollout.environment, row {query.id}", fix="correct the class")
        return result.text

    async def end(self, session: str) -> tuple[float | None, Failure | None]:
        """End a response in the environment: its reward, or why there is none."""
        reward: float | None = None
        failure: Failure | None = None
        if GET_REWARD in self.by_name:
            result = await self.by_name[GET_REWARD].call(session, {})
            try:
                given = json.loads(result.text or "null")
                reward = None if given is None else float(given)
            except (ValueError, TypeError):
                failure = Failure(kind="invalid", message=f"get_reward returns no number: {result.text[:80]}")
            failure = result.failure or failure
        if CLOSE in self.by_name:
            await self.by_name[CLOSE].call(session, {})
        return reward, failure

    async def answers(self, session: str, calls: Sequence[str]) -> list[Result]:
        """Make the calls of a turn: in an environment one after the other, for they may change it, else all at once."""
        if RESET in self.by_name:
            return [await self.answer(session, call) for call in calls]
        return await all_of([self.answer(session, call) for call in calls])

    async def answer(self, session: str, call: str) -> Result:
        """Make the call that a text says, the inside of `<tool_call>`; what is wrong with it is a result, too."""
        try:
            said = json.loads(call)
            name, arguments = said["name"], said.get("arguments", said.get("parameters", {}))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(arguments, dict):
                raise TypeError
            _check_depth(arguments)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            form = '{"name": "…", "arguments": {…}}'
            return Result(text=f"error: a call is JSON of the form {form}", is_error=True)
        if not isinstance(name, str) or name not in self.shown:
            known = ", ".join(self.shown)
            return Result(text=f"error: there is no tool {str(name)[:80]!r}; there are: {known}", is_error=True)
        return await self.by_name[name].call(session, arguments)


@dataclass(kw_only=True)
class _Written:
    """A response so far."""

    turns: list[Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of the policy's turns, each with all before it as its prompt
    contexts: list[list[int]] = field(default_factory=list)  # the tokens before the first and between them
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    finish_reason: FinishReason = "stop"
    failure: Failure | None = None


class Conversation:
    """Rollouts of several turns: `await rollout(query, generate)` is one Sample; no token is ever encoded anew."""

    def __init__(self, policy: Policy, settings: RolloutConfig, tools: Tools) -> None:
        self._policy, self._settings, self._tools = policy, settings, tools
        if tools.bridge.role is None:  # no token ends a turn that is not the last
            settings = settings.model_copy(update={"stop_strings": (*settings.stop_strings, "</tool_call>")})
        self._single_turn = SingleTurn(policy, settings)

    async def __call__(self, query: Query, generate: Generate) -> Sample:
        """The response; the loss mask is false on what tools returned, and what the chat template writes around it."""
        written, ids, most = _Written(), [*query.prompt_ids], len(query.prompt_ids) + self._settings.max_new_tokens
        said = await self._tools.begin(written.session, query)
        written.contexts.append([] if said is None else self._tools.bridge.opening(said))
        ids += written.contexts[0]
        if said is not None:
            written.turns.append(Turn(role="user", text=said, num_tokens=len(written.contexts[0])))
        if len(ids) >= most:
            what = f"what the environment says first has {len(written.contexts[0])} tokens"
            fix = f"raise rollout.max_new_tokens, which is {self._settings.max_new_tokens}"
            raise UserError(what, where=f"rollout.environment, row {query.id}", fix=fix)
        while True:
            turn = partial(generate, turn=len(written.samples), max_new_tokens=most - len(ids))
            sample = await self._single_turn(replace(query, prompt_ids=tuple(ids)), turn)
            ids += sample.token_ids.tolist()
            written.samples.append(sample)
            written.turns.append(Turn(role="assistant", text=sample.text, num_tokens=sample.num_tokens))
            context = await self._context(written, room=most - len(ids))
            if context is None:
                reward, failure = await self._tools.end(written.session)
                written.failure = written.failure or failure
                return replace(self._joined(query, written), environment_reward=reward)
            ids += context
            written.contexts.append(context)

    async def _context(self, written: _Written, *, room: int) -> list[int] | None:
        """Make the calls of the last turn; return what follows it, or None where the response has ended."""
        sample = written.samples[-1]
        written.finish_reason = sample.finish_reason
        calls = _CALL.findall(sample.text) if sample.finish_reason == "stop" else []
        if calls and len(written.samples) == self._settings.max_turns:
            written.finish_reason = "turns"
        if written.finish_reason != "stop" or not calls:
            return None
        results = await self._tools.answers(written.session, calls)
        written.failure = next((result.failure for result in results if result.failure), None)
        texts, num_errors = [result.text for result in results], sum(result.is_error for result in results)
        written.turns[-1] = replace(written.turns[-1], num_calls=len(calls), num_errors=num_errors)
        if written.failure:
            return None
        context = self._tools.bridge.tokens(texts, last=int(sample.token_ids[-1]))
        if len(context) >= room:
            written.finish_reason = "length"
            return None
        written.turns.append(Turn(role="tool", text="\n".join(texts), num_tokens=len(context)))
        return context

    def _joined(self, query: Query, written: _Written) -> Sample:
        """The turns as one sample."""
        samples, first, last = written.samples, written.samples[0], written.samples[-1]
        tokens, masks = list[Tensor](), list[Tensor]()
        for context, sample in zip(written.contexts, samples, strict=True):
            tokens += [torch.tensor(context, dtype=first.token_ids.dtype), sample.token_ids]
            masks += [torch.zeros(len(context), dtype=torch.bool), sample.loss_mask]
        ids, full = torch.cat(tokens), [each for sample in samples if (each := sample.full_logprobs) is not None]
        experts = None
        if first.experts is not None and last.experts is not None:  # the last turn's pass has read all before it
            size = len(first.experts.prefix) - len(written.contexts[0])
            row = torch.cat([last.experts.prefix[size:], last.experts.row])
            experts = Experts(prefix=last.experts.prefix[:size], row=row)
        return replace(
            first,
            query=query,
            token_ids=ids,
            loss_mask=torch.cat(masks),
            text=text_and_segments(ids.tolist(), query.prompt_ids, self._policy, None)[0],
            finish_reason=written.finish_reason,
            sampler_logprobs=torch.cat([sample.sampler_logprobs for sample in samples]),
            full_logprobs=torch.cat(full) if len(full) == len(samples) else None,
            versions=tuple(_merged([span for sample in samples for span in sample.versions])),
            experts=experts,
            turns=tuple(written.turns),
            failure=written.failure,
        )


def _check_depth(arguments: Any) -> None:
    """Raise RecursionError for what could not be handed to a process, wherever that is done."""
    level, count = [arguments], 0
    while level := [inner for each in level for inner in _inside(each)]:
        count += 1
        if count > _MAX_LEVELS:
            raise RecursionError


def _inside(value: Any) -> Sequence[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans, those of one version that follow each other as one."""
    merged = list[tuple[int, int]]()
    for version, count in spans:
        if merged and merged[-1][0] == version:
            count += merged.pop()[1]
        merged.append((version, count))
    return merged
