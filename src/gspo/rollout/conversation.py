"""Rollouts of several turns: the policy calls tools and reads their results, until it answers without a call."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.dialects import CALL
from gspo.rollout.segments import text_and_segments
from gspo.rollout.single_turn import Generate, SingleTurn
from gspo.rollout.tools import Tools
from gspo.types import Experts, Failure, FinishReason, Query, Sample, Turn


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
        written = _Written()
        try:
            return await self._sample(query, generate, written)
        finally:
            await self._tools.end(written.session)

    async def _sample(self, query: Query, generate: Generate, written: _Written) -> Sample:
        ids, most = [*query.prompt_ids], len(query.prompt_ids) + self._settings.max_new_tokens
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
                reward = None
                if written.failure is None:  # else it may hang
                    reward, written.failure = await self._tools.reward(written.session)
                return replace(self._joined(query, written), environment_reward=reward)
            ids += context
            written.contexts.append(context)

    async def _context(self, written: _Written, *, room: int) -> list[int] | None:
        """Make the calls of the last turn; return what follows it, or None where the response has ended."""
        sample = written.samples[-1]
        written.finish_reason = sample.finish_reason
        calls = CALL.findall(sample.text) if sample.finish_reason == "stop" else []
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
            versions=tuple(merged([span for sample in samples for span in sample.versions])),
            experts=experts,
            turns=tuple(written.turns),
            failure=written.failure,
        )


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans, those of one version that follow each other as one."""
    merged = list[tuple[int, int]]()
    for version, count in spans:
        if merged and merged[-1][0] == version:
            count += merged.pop()[1]
        merged.append((version, count))
    return merged
