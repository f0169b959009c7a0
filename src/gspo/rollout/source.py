"""Groups of rollouts from the engine: responses with their text and provenance."""

from collections.abc import Sequence

from gspo.config import Rollout as Sampling
from gspo.policy.model import Policy
from gspo.records import Group, Query, Rollout
from gspo.rollout.embedded import Response, generate


def sample_groups(
    policy: Policy,
    queries: Sequence[Query],
    sampling: Sampling,
    *,
    group_size: int,
    seed: int,
    policy_version: int,
    record_experts: bool = False,
) -> tuple[Group, ...]:
    """`group_size` rollouts of each query by the policy as it is now."""
    prompts = [query.prompt_ids for query in queries]
    sampled = generate(policy, prompts, sampling, group_size=group_size, seed=seed, record_experts=record_experts)
    return tuple(
        Group(query=query, rollouts=tuple(_rollout(policy, response, policy_version) for response in responses))
        for query, responses in zip(queries, sampled, strict=True)
    )


def _rollout(policy: Policy, response: Response, policy_version: int) -> Rollout:
    return Rollout(
        response_ids=response.ids,
        text=policy.tokenizer.decode(response.ids.tolist(), skip_special_tokens=True),
        sampler_logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        policy_version=policy_version,
        experts=response.experts,
    )
