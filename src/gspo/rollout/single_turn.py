"""From a query to one finished sample: a prompt, and what the policy adds to it, up to a stop string."""

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from gspo.engine.engine import Completion
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.segments import Continuation, text_and_segments
from gspo.types import Experts, Query, Sample

# Has the policy continue token ids: `await generate(ids, is_complete, turn=0, max_new_tokens=None)`. `is_complete`,
# called with each token, tells whether a text that ends the completion is there; None: there is none to look for. In a
# response of several turns, `turn` counts from 0, and `max_new_tokens` is what is left of them.
Generate = Callable[..., Awaitable[Completion]]
_MARGIN = 8  # characters: a text decoded from its middle may begin otherwise, with a space less or half a character


class StopStrings:
    """The strings, and which tokens can complete one of them."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        self.num_characters = max(map(len, strings), default=0) + _MARGIN
        self.may_complete = cache(self._has_last_character)

    def _has_last_character(self, token: int) -> bool:
        """Tell whether a string can be complete with the token: most tokens are not looked at further."""
        text = self.tokenizer.decode([token, token])  # the second has what a tokenizer may take off a beginning
        return "\N{REPLACEMENT CHARACTER}" in text or any(string[-1] in text for string in self.strings)


class WatchedResponse:
    """A response that is called with its tokens, one after the other, and says when it is complete."""

    def __init__(self, strings: StopStrings, prompt_ids: Sequence[int]) -> None:
        self.strings, self._prompt_ids = strings, prompt_ids
        self._decode: Continuation | None = None  # made when it is needed
        self.tokens: list[int] = []  # so far
        self.is_complete = False

    def __call__(self, token: int) -> bool:
        """Take in the next token; whether the text contains a stop string now."""
        self.tokens.append(token)
        self.is_complete = self.strings.may_complete(token) and self._contains_one()
        return self.is_complete

    def _contains_one(self) -> bool:
        """Tell whether the text contains a string: in its last characters first, then in the whole."""
        self._decode = decode = self._decode or Continuation(self.strings.tokenizer, self._prompt_ids)
        size = self.strings.num_characters  # in tokens at first: few of them have less than a character
        while len(text := decode(self.tokens[-size:])) < self.strings.num_characters and size < len(self.tokens):
            size *= 2
        near = [string for string in self.strings.strings if string in text]
        return any(string in decode(self.tokens) for string in near)


class SingleTurn:
    """Rollouts of one turn: `await rollout(query, generate)` is a Sample."""

    def __init__(self, policy: Policy, settings: RolloutConfig) -> None:
        self._policy, self._settings = policy, settings
        self._strings = StopStrings(policy.tokenizer, settings.stop_strings)

    async def __call__(self, query: Query, generate: Generate) -> Sample:
        """The response, up to the end of its first stop string."""
        watched = WatchedResponse(self._strings, query.prompt_ids) if self._settings.stop_strings else None
        completion = await generate(query.prompt_ids, watched)
        end = None  # of a response without a stop string
        if watched is not None:
            unread = completion.token_ids[len(watched.tokens) :].tolist()  # the engine may not have asked
            if watched.is_complete or any(map(watched, unread)):
                end = len(watched.tokens)
        ids, full, experts = completion.token_ids[:end], completion.full_logprobs, completion.experts
        separator = self._settings.segment_separator
        text, segments = text_and_segments(ids.tolist(), query.prompt_ids, self._policy, separator)
        return Sample(
            query=query,
            token_ids=ids,
            loss_mask=torch.ones_like(ids, dtype=torch.bool),
            text=text,
            sampler_logprobs=completion.logprobs[:end],
            full_logprobs=None if full is None else full[:end],
            finish_reason=completion.finish_reason if end is None else "stop",
            versions=_cut(completion.versions, len(ids)),
            experts=None if experts is None else Experts(prefix=experts.prefix, row=experts.row[:end]),
            segments=segments,
        )


def _cut(versions: Sequence[tuple[int, int]], end: int) -> tuple[tuple[int, int], ...]:
    """The spans of the first so many tokens."""
    ends = [min(place, end) for place in accumulate(count for _, count in versions)]
    spans = zip(versions, pairwise([0, *ends]), strict=True)
    return tuple((version, stop - start) for (version, _), (start, stop) in spans if stop > start)
