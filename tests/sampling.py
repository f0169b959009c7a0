"""Responses that the embedded engine samples, for tests of whatever comes after."""

from collections.abc import Callable, Sequence

from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.engine import SamplingKey
from gspo.types import Group, Query, Sample


def sample_groups(
    policy: Policy,
    queries: Sequence[Query],
    settings: RolloutConfig,
    *,
    group_size: int,
    seed: int,
    policy_version: int = 0,
    record_experts: bool = False,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[Group, ...]:
    """A group for each query, sampled by the policy as it is now."""
    engine = EmbeddedEngine(policy)
    engine.publish(policy, policy_version)
    settings = settings.model_copy(update={"group_size": group_size})
    key = SamplingKey(seed=seed, step=1)
    return engine.sample(queries, settings, key, record_experts=record_experts, check_stop=check_stop)


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
