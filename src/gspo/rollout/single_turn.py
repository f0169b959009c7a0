"""From a query to one finished sample: a prompt, and what the policy adds to it."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

import torch

from gspo.engine.engine import Completion
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.segments import text_and_segments
from gspo.rollout.stop_strings import StopStrings, WatchedResponse
from gspo.types import Experts, Query, Sample


@runtime_checkable
class Generate(Protocol):
    """Have the policy continue token ids."""

    async def __call__(
        self,
        ids: Sequence[int],
        is_complete: Callable[[int], bool] | None,
        *,
        turn: int = 0,
        max_new_tokens: int | None = None,
    ) -> Completion:
        """Return what it adds; `is_complete`, called with each token, tells whether a text that ends it is complete.

        In a response of several turns, `turn` counts from 0, and `max_new_tokens` is what is left of them.
        """
        ...


class SingleTurn:
    """Rollouts of one turn: `await rollout(query, generate)` is a Sample."""

    def __init__(self, policy: Policy, settings: RolloutConfig) -> None:
        self._policy, self._settings = policy, settings
        self._strings = StopStrings(policy.tokenizer, settings.stop_strings)

    async def __call__(self, query: Query, generate: Generate) -> Sample:
        """The response, up to the end of its first stop string."""
        watched = WatchedResponse(self._strings, query.prompt_ids) if self._settings.stop_strings else None
        completion = await generate(query.prompt_ids, watched)
        if watched is None:
            return self._sample(query, completion, None)
        unread = completion.token_ids[len(watched.tokens) :].tolist()  # the engine may not have asked
        is_complete = watched.is_complete or any(map(watched, unread))
        return self._sample(query, completion, len(watched.tokens) if is_complete else None)

    def _sample(self, query: Query, completion: Completion, end: int | None) -> Sample:
        """The first tokens as a sample: all, or as many as a stop string ends after."""
        ids, full, experts = completion.token_ids[:end], completion.full_logprobs, completion.experts
        text, segments = text_and_segments(
            ids.tolist(), query.prompt_ids, self._policy, self._settings.segment_separator
        )
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
