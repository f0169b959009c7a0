"""The embedded engine: it decodes with the policy's own weights, in the process that trains them."""

from collections.abc import Callable, Mapping, Sequence

import torch

from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.embedded.decoding import Decoding, Means, Response
from gspo.rollout.embedded.proof import proven_means
from gspo.rollout.engine import SamplingKey
from gspo.rollout.segments import text_and_segments
from gspo.types import Group, Query, Sample, ShowProgress

_SLOW = {
    Means.NO_PADDING: "with prompts of one length at a time, for its cache is wrong beside padding",
    Means.NO_CACHE: "without a cache, slowly: all tokens are read again for each new one",
}


class EmbeddedEngine:
    """An engine without weights of its own: it samples from whatever the policy has learned so far."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._version = 0
        with torch.inference_mode():
            self._means = proven_means(policy)

    def sample(
        self,
        queries: Sequence[Query],
        settings: RolloutConfig,
        key: SamplingKey,
        *,
        record_experts: bool = False,
        check_stop: Callable[[], None] = lambda: None,
        show_progress: ShowProgress = lambda *_: None,
    ) -> tuple[Group, ...]:
        """Decode the responses in this process, at most `settings.max_rows` side by side."""
        with torch.inference_mode():
            decoding = Decoding(
                policy=self._policy,
                prompts=[query.prompt_ids for query in queries],
                settings=settings,
                keys=key.response_keys([query.id for query in queries], settings.group_size),
                record_experts=record_experts,
                check_stop=check_stop,
                show_progress=show_progress,
                means=self._means,
            )
            responses = decoding.generate().responses(self._policy.stop_ids, decoding.stop_strings.ends)
        groups = [
            [self._sample_of(query, next(responses), settings) for _ in range(settings.group_size)] for query in queries
        ]
        return tuple(Group(samples=tuple(samples)) for samples in groups)

    def _sample_of(self, query: Query, response: Response, settings: RolloutConfig) -> Sample:
        ids = response.token_ids
        text, segments = text_and_segments(ids.tolist(), query.prompt_ids, self._policy, settings.segment_separator)
        return Sample(
            query=query,
            token_ids=ids,
            loss_mask=torch.ones_like(ids, dtype=torch.bool),
            text=text,
            sampler_logprobs=response.logprobs,
            full_logprobs=response.full_logprobs,
            finish_reason=response.finish_reason,
            versions=((self._version, len(ids)),),
            experts=response.experts,
            segments=segments,
        )

    def publish(self, policy: Policy, version: int) -> None:
        """Note the version, for the weights are the policy's own."""
        assert policy is self._policy
        self._version = version

    def describe(self) -> Mapping[str, str]:
        """By which means tokens are decoded: the decoder written out rounds in its own way."""
        slow = {"decoding": _SLOW[self._means]} if self._means in _SLOW else {}
        return {"engine": "embedded", "decoder written out": str(self._means is Means.WRITTEN_OUT), **slow}

    def take_metrics(self) -> Mapping[str, float]:
        """Nothing: there are no weights to hand over, and no server to fail."""
        return {}

    def close(self) -> None:
        """Do nothing, for the memory is the policy's."""
