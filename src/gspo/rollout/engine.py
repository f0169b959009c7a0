"""The protocol of an engine, which samples responses, and the engine that a recipe names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from gspo.model.policy import Policy
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.random_numbers import SamplingKey
from gspo.types import Group, Query


@runtime_checkable
class Engine(Protocol):
    """Samples responses with the weights that were published last; a run makes one engine and closes it at its end."""

    def sample(
        self,
        queries: Sequence[Query],
        settings: RolloutConfig,
        key: SamplingKey,
        *,
        record_experts: bool = False,
        check_stop: Callable[[], None] = lambda: None,
    ) -> tuple[Group, ...]:
        """A group of `settings.group_size` responses to each query, in the order of the queries.

        An engine may work on all queries at the same time. A response's tokens depend on its query, its number and
        `key`, not on what is sampled beside it. `check_stop` is called again and again while tokens are sampled; what
        it raises abandons the responses and leaves the engine ready for the next call.
        """
        ...

    def publish(self, policy: Policy, version: int) -> None:
        """Sample with the policy's present weights from now on; a version that is published already changes nothing."""
        ...

    def describe(self) -> Mapping[str, str]:
        """What decides the last bit of the engine's numbers, for the description of a checkpoint's environment."""
        ...

    def close(self) -> None:
        """End the engine's processes and free its memory; a second call does nothing."""
        ...


def make_engine(recipe: Recipe, policy: Policy) -> Engine:
    """The engine that `rollout.engine` names, with the policy's weights as version 0."""
    match recipe.rollout.engine:
        case "embedded":
            return EmbeddedEngine(policy)
