"""The protocol of an engine, which samples responses, what decides its random numbers, and the engine of a recipe."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from gspo.model.policy import Policy
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import RolloutConfig, ServerConfig
from gspo.types import Group, Query, ShowProgress


@dataclass(frozen=True, kw_only=True)
class SamplingKey:
    """What decides, together with a query's id and a sample's number, all random numbers of a response.

    Example: SamplingKey(seed=0, step=12).response_keys(["gsm8k:7", "gsm8k:2"], 8) gives 16 keys.
    """

    seed: int
    step: int  # 0 for an evaluation

    def response_keys(self, query_ids: Sequence[str], num_samples: int) -> list[int]:
        """A number of 128 bits for each response, `num_samples` for the first query, then those of the second.

        A query that stands twice in the list goes on counting its samples, so that its two groups differ.
        """
        counts: Counter[str] = Counter()
        texts = []
        for query_id in query_ids:
            first = counts[query_id]
            texts += [f"{self.seed} {self.step} {first + number} {query_id}" for number in range(num_samples)]
            counts[query_id] += num_samples
        # A file's name, and so an id, may hold bytes that are no UTF-8.
        digests = [blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest() for text in texts]
        return [int.from_bytes(digest, "big") for digest in digests]


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
        show_progress: ShowProgress = lambda *_: None,
    ) -> tuple[Group, ...]:
        """A group of `settings.group_size` responses to each query, in the order of the queries.

        An engine may work on all queries at the same time. A response's tokens depend on its query, its number and
        `key`, not on what is sampled beside it. `check_stop` is called again and again while tokens are sampled; what
        it raises abandons the responses and leaves the engine ready for the next call. `show_progress` is called with
        how many responses have ended, how many there will be, and what they are.
        """
        ...

    def publish(self, policy: Policy, version: int) -> None:
        """Sample with the policy's present weights from now on; a version that is published already changes nothing."""
        ...

    def describe(self) -> Mapping[str, str]:
        """What decides the last bit of the engine's numbers, for the description of a checkpoint's environment."""
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """What it has measured since the last call, by the names of metrics.jsonl."""
        ...

    def close(self) -> None:
        """End the engine's processes and free its memory; a second call does nothing."""
        ...


def engine_summary(recipe: Recipe) -> str:
    """The engine of the recipe in a line."""
    name = recipe.rollout.engine
    if recipe.rollout.is_in_trainer:
        return "embedded, in the trainer's process"
    server: ServerConfig = getattr(recipe.rollout, name)
    number = recipe.cluster.engines or max(1, len(server.devices))
    kind = "in processes of its own, " if name == "embedded" else ""
    started = f"{kind}{number} to be started by {server.python or 'the interpreter that runs gspo'}"
    return f"{name}: {', '.join(server.urls) or started}; it is proven to have the weights when the run starts"


def check_engine(recipe: Recipe, *, device: torch.device, longest_sequence: int) -> None:
    """UserError where the engine of the recipe cannot be used; nothing is started."""
    if not recipe.rollout.is_in_trainer:
        from gspo.rollout.servers.engine import check_servers

        check_servers(recipe, device=device, longest_sequence=longest_sequence)


def make_engine(
    recipe: Recipe,
    policy: Policy,
    *,
    directory: Path = Path(),
    longest_sequence: int = 0,
    check_stop: Callable[[], None] = lambda: None,
    say: Callable[[str], object] = lambda _: None,
) -> Engine:
    """The engine that `rollout.engine` names; it samples once the policy's weights are published.

    A server writes its log into the directory, and takes prompt and response of up to `longest_sequence` tokens.
    UserError where it cannot be used.
    """
    if recipe.rollout.is_in_trainer:
        from gspo.rollout.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(policy)
    from gspo.rollout.servers.engine import server_engine

    return server_engine(
        recipe, policy, directory=directory, longest_sequence=longest_sequence, check_stop=check_stop, say=say
    )
