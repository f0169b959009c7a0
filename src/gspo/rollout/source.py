"""Groups of samples from the engine: responses with their text and provenance."""

from collections.abc import Sequence
from functools import partial

import torch

from gspo.model.policy import Policy
from gspo.recipe.schema import RolloutConfig
from gspo.rollout.embedded.engine import Response, generate
from gspo.rollout.segments import segment_lengths
from gspo.types import Group, Query, Sample


def sample_groups(
    policy: Policy,
    queries: Sequence[Query],
    sampling: RolloutConfig,
    *,
    group_size: int,
    seed: int,
    policy_version: int,
    record_experts: bool = False,
) -> tuple[Group, ...]:
    """`group_size` samples of each query by the policy as it is now."""
    prompts = [query.prompt_ids for query in queries]
    sampled = generate(policy, prompts, sampling, group_size=group_size, seed=seed, record_experts=record_experts)
    return tuple(
        Group(samples=tuple(_sample(policy, query, response, sampling, policy_version) for response in responses))
        for query, responses in zip(queries, sampled, strict=True)
    )


def _sample(policy: Policy, query: Query, response: Response, sampling: RolloutConfig, policy_version: int) -> Sample:
    ids, separator = response.ids.tolist(), sampling.segment_separator
    decode = partial(policy.tokenizer.decode, skip_special_tokens=True)
    return Sample(
        query=query,
        token_ids=response.ids,
        loss_mask=torch.ones(len(ids), dtype=torch.bool),
        text=decode(ids),
        sampler_logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        versions=((policy_version, len(ids)),),
        experts=response.experts,
        segments=() if separator is None else segment_lengths(ids, decode, separator),
    )
