"""Groups of rollouts from the engine: responses with their text and provenance."""

from collections.abc import Callable, Sequence
from functools import partial

from gspo.model.policy import Policy
from gspo.recipe.schema import RolloutConfig
from gspo.rollout.embedded.engine import Response, generate
from gspo.rollout.segments import segment_lengths
from gspo.types import Group, Query, Rollout


def sample_groups(
    policy: Policy,
    queries: Sequence[Query],
    sampling: RolloutConfig,
    *,
    group_size: int,
    seed: int,
    policy_version: int,
    record_experts: bool = False,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[Group, ...]:
    """`group_size` rollouts of each query by the policy as it is now."""
    prompts = [query.prompt_ids for query in queries]
    sampled = generate(
        policy,
        prompts,
        sampling,
        group_size=group_size,
        seed=seed,
        record_experts=record_experts,
        check_stop=check_stop,
    )
    return tuple(
        Group(query=query, rollouts=tuple(_rollout(policy, one, sampling, policy_version) for one in responses))
        for query, responses in zip(queries, sampled, strict=True)
    )


def _rollout(policy: Policy, response: Response, sampling: RolloutConfig, policy_version: int) -> Rollout:
    ids, separator = response.ids.tolist(), sampling.segment_separator
    decode = partial(policy.tokenizer.decode, skip_special_tokens=True)
    return Rollout(
        response_ids=response.ids,
        text=decode(ids),
        sampler_logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        policy_version=policy_version,
        experts=response.experts,
        segments=() if separator is None else segment_lengths(ids, decode, separator),
    )
