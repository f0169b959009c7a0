"""Rollouts of several turns: the policy calls tools, or an environment answers it, until either has no more to say."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum
from typing import Any

import torch

from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.dialects import CALL
from gspo.rollout.segments import text_and_segments
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

    def read(self, context: Sequence[int]) -> None:
        """Append what the policy only reads."""
        self.ids += context
        self.mask += [False] * len(context)

    def write(self, sample: Sample) -> None:
        """Append a turn of the policy's."""
        self.ids += sample.token_ids.tolist()
        self.mask += [True] * sample.num_tokens
        self.samples.append(sample)


class Conversation:
    """Rollouts of several turns: `await rollout(query, generate)` is one Sample; no token is ever encoded anew."""

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
        settings, tools, written = self._settings, self._tools, Written()
        by_steps = tools.environment is not None and tools.environment.by_steps
        answered = self._step if by_steps else self._call_tools
        said = await tools.begin(session, query)
        if said is not None:
            written.read(tools.bridge.opening(said))
            written.turns.append(Turn(role="user", text=said, num_tokens=len(written.ids)))
        if len(written.ids) >= settings.max_new_tokens:
            what = f"what the environment says first has {len(written.ids)} tokens"
            fix = f"raise rollout.max_new_tokens, which is {settings.max_new_tokens}"
            raise UserError(what, where=f"rollout.environment, row {query.id}", fix=fix)
        while True:
            room = settings.max_new_tokens - len(written.ids)
            turn = partial(generate, turn=len(written.samples), max_new_tokens=room)
            prompt = replace(query, prompt_ids=(*query.prompt_ids, *written.ids))
            sample = await self._single_turn(prompt, turn)
            written.write(sample)
            written.turns.append(Turn(role="assistant", text=sample.text, num_tokens=sample.num_tokens))
            is_over = await answered(session, written)
            if is_over is not None:
                break
        reason, failure = is_over
        reward = None
        if failure is None:  # else the environment may hang
            reward, failure = await tools.reward(session)
        given = [turn.reward for turn in written.turns if turn.reward is not None]
        if by_steps and (given or reason == "length"):  # a first turn that is cut off has earned nothing
            reward = fsum(given)
        return joined(
            self._policy,
            query,
            [written],
            finish_reason=reason,
            experts=_experts(written.samples[-1], len(query.prompt_ids)),
            failure=failure,
            environment_reward=reward,
        )

    async def _call_tools(self, session: str, written: Written) -> tuple[FinishReason, Failure | None] | None:
        """Make the calls of the last turn and append what they return; where the response is over, return why."""
        sample = written.samples[-1]
        calls = CALL.findall(sample.text) if sample.finish_reason == "stop" else []
        if not calls:
            return sample.finish_reason, None
        if len(written.samples) == self._settings.max_turns:
            return "turns", None
        results = await self._tools.answers(session, calls)
        num_errors = sum(result.is_error for result in results)
        written.turns[-1] = replace(written.turns[-1], num_calls=len(calls), num_errors=num_errors)
        if failure := next((result.failure for result in results if result.failure), None):
            return "stop", failure
        return self._read([result.text for result in results], written)

    async def _step(self, session: str, written: Written) -> tuple[FinishReason, Failure | None] | None:
        """Have the environment answer the last turn and append what it says; where the response is over, return why."""
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
        if len(written.samples) == self._settings.max_turns:
            return "turns", None
        return self._read([said[: self._settings.tool_characters]], written)

    def _read(self, texts: Sequence[str], written: Written) -> tuple[FinishReason, None] | None:
        """Append what tools or the environment say; where it has no room, return so."""
        bridge = self._tools.bridge
        context = bridge.tokens(texts, last=int(written.ids[-1]))
        if len(written.ids) + len(context) >= self._settings.max_new_tokens:
            return "length", None
        written.read(context)
        written.turns.append(Turn(role=bridge.speaker, text="\n".join(texts), num_tokens=len(context)))
        return None


def joined(policy: Policy, query: Query, pieces: Sequence[Written], **others: Any) -> Sample:
    """All turns of some contexts as one sample, with `others` of its fields."""
    samples = [sample for piece in pieces for sample in piece.samples]
    ids = [token for piece in pieces for token in piece.ids]
    full = [each for sample in samples if (each := sample.full_logprobs) is not None]
    return replace(
        samples[-1],
        query=query,
        token_ids=torch.tensor(ids, dtype=samples[0].token_ids.dtype),
        loss_mask=torch.tensor([is_written for piece in pieces for is_written in piece.mask]),
        text=text_and_segments(ids, query.prompt_ids, policy, None)[0],
        sampler_logprobs=torch.cat([sample.sampler_logprobs for sample in samples]),
        full_logprobs=torch.cat(full) if len(full) == len(samples) else None,
        versions=tuple(merged([span for sample in samples for span in sample.versions])),
        turns=tuple(turn for piece in pieces for turn in piece.turns),
        **others,
    )


def _experts(last: Sample, num_prompt_ids: int) -> Experts | None:
    """The experts of the whole response: the last turn's pass has read all before it."""
    if last.experts is None:
        return None
    whole, size = torch.cat([last.experts.prefix, last.experts.row]), num_prompt_ids - 1
    return Experts(prefix=whole[:size], row=whole[size:])


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans, those of one version that follow each other as one."""
    merged = list[tuple[int, int]]()
    for version, count in spans:
        if merged and merged[-1][0] == version:
            count += merged.pop()[1]
        merged.append((version, count))
    return merged
