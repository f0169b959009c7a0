"""Responses that the embedded engine samples, for tests of whatever comes after."""

from collections.abc import Sequence

from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Group, Query, Sample


def sampler_of(policy: Policy, *, max_rows: int = 512) -> Sampler:
    """Samples with the policy's own weights, in a thread."""
    return Sampler(EmbeddedEngine(policy, max_rows=max_rows), policy)


def sample_groups(
    policy: Policy,
    queries: Sequence[Query],
    settings: RolloutConfig,
    *,
    group_size: int,
    seed: int,
    policy_version: int = 0,
    record_experts: bool = False,
) -> tuple[Group, ...]:
    """A group for each query, sampled by the policy as it is now."""
    sampler = sampler_of(policy, max_rows=settings.max_rows)
    sampler.publish(policy_version)
    settings = settings.model_copy(update={"group_size": group_size})
    key = SamplingKey(seed=seed, step=1)
    return sampler.sample(queries, settings, key, record_experts=record_experts)


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    settings: RolloutConfig,
    *,
    group_size: int,
    seed: int,
    record_experts: bool = False,
) -> list[list[Sample]]:
    """The responses to queries of which only the tokens matter."""
    queries = [
        Query(id=f"test:{number}", prompt="", text="", prompt_ids=tuple(prompt), columns={})
        for number, prompt in enumerate(prompts)
    ]
    groups = sample_groups(policy, queries, settings, group_size=group_size, seed=seed, record_experts=record_experts)
    return [list(group.samples) for group in groups]
