"""The engine of several ranks: rank 0 asks it, and all ranks take part in what it is asked."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from signal import Signals
from typing import Any

from gspo.errors import RunError, Stopped
from gspo.model.policy import Policy
from gspo.model.sharding import unsharded
from gspo.ranks import ask_others, from_first, gathered, meet, num_ranks, rank
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.beside import BesideEngine
from gspo.rollout.engine import Engine, SamplingKey
from gspo.types import Group, Query, ShowProgress


@dataclass(frozen=True, kw_only=True)
class _Queries:
    """What all ranks are to sample."""

    queries: Sequence[Query]
    settings: RolloutConfig
    key: SamplingKey
    record_experts: bool


class EngineOfRanks:
    """Samples with the weights of a model that ranks share.

    An embedded engine samples on every rank, each for its share of the queries: from `publish` to `release` each of
    them has the whole model. Servers are rank 0's, which gathers the weights for them layer by layer.
    """

    def __init__(
        self, policy: Policy, make: Callable[[Policy], Engine], *, is_embedded: bool, check_stop: Callable[[], None]
    ) -> None:
        """`make` makes the engine: on every rank where it is embedded."""
        self._policy, self._check_stop, self._held = policy, check_stop, ExitStack()
        self._own: Engine | None = None
        self._is_embedded = is_embedded
        self._description: Mapping[str, str] = {}
        if is_embedded:
            with unsharded(policy.model):  # which the engine proves what it describes with
                self._own = make(policy)
                self._description = self._own.describe()
        else:
            self._policy = replace(policy, call_others=ask_others) if rank() == 0 else policy
            from_first(lambda: self._start_servers(make), self.help_with)

    def _start_servers(self, make: Callable[[Policy], Engine]) -> None:
        self._own = make(self._policy)
        self._description = self._own.describe()

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
        """Called by rank 0: a group for each query, in their order, as Engine has it."""
        options: dict[str, Any] = {"check_stop": check_stop, "show_progress": show_progress}
        if not self._is_embedded:
            assert self._own is not None
            return self._own.sample(queries, settings, key, record_experts=record_experts, **options)
        asked = _Queries(queries=queries, settings=settings, key=key, record_experts=record_experts)
        ask_others(asked)
        shares = self._sample(asked, **options)
        groups = [shares[place % num_ranks()][place // num_ranks()] for place in range(len(queries))]
        return tuple(_about(group, query) for group, query in zip(groups, queries, strict=True))

    def sample_beside(self, *arguments: Any, **options: Any) -> None:
        """Called by a thread of rank 0, as BesideEngine has it; servers can do that."""
        assert isinstance(self._own, BesideEngine)
        self._own.sample_beside(*arguments, **options)

    def help_with(self, asked: _Queries | int | str | None) -> None:
        """What the other ranks do when rank 0 samples or publishes: a number is the version of the weights."""
        if isinstance(asked, _Queries):
            self._sample(asked, self._check_stop, lambda *_: None)
        elif isinstance(asked, int):
            self._hold(asked)
        else:
            self._policy.take_part(asked)

    def _sample(
        self, asked: _Queries, check_stop: Callable[[], None], show_progress: ShowProgress
    ) -> list[Sequence[Group]]:
        """What every rank has sampled. Rank 0 raises its own error, or the first of another's, and tells it to all."""
        assert self._own is not None
        groups: Sequence[Group] = ()
        failure: BaseException | None = None
        try:
            if mine := asked.queries[rank() :: num_ranks()]:
                groups = self._own.sample(
                    mine,
                    asked.settings,
                    asked.key,
                    record_experts=asked.record_experts,
                    check_stop=check_stop,
                    show_progress=show_progress,
                )
        except (Exception, KeyboardInterrupt) as error:  # Stopped is one of the latter
            failure = error
        meet()
        signal = int(failure.args[0]) if isinstance(failure, Stopped) else None
        results = gathered((groups, signal, failure and f"{type(failure).__name__}: {failure}"))
        if rank() == 0:
            if failure is not None:
                raise failure
            for other, (_, number, text) in enumerate(results):
                if number is not None:
                    raise Stopped(Signals(number))
                if text is not None:
                    raise RunError(f"rank {other} could not sample: {text}")
        return [sampled for sampled, _, _ in results]

    def publish(self, policy: Policy, version: int) -> None:
        """Called by rank 0: have the engine sample with the present weights."""
        if self._is_embedded:
            ask_others(version)
            self._hold(version)
        else:
            assert self._own is not None
            self._own.publish(self._policy, version)

    def _hold(self, version: int) -> None:
        """Have the whole model on this rank, for its engine to sample with."""
        assert self._own is not None
        self._held.close()
        self._held.enter_context(unsharded(self._policy.model))
        self._own.publish(self._policy, version)

    def release(self) -> None:
        """Share the model among the ranks again: before it is trained."""
        self._held.close()

    def describe(self) -> Mapping[str, str]:
        """The engine's own description."""
        return self._description

    def take_metrics(self) -> Mapping[str, float]:
        """The engine's own."""
        return self._own.take_metrics() if self._own else {}

    def close(self) -> None:
        """End the engine."""
        if self._own:
            self._own.close()


def _about(group: Group, query: Query) -> Group:
    """The group with the query itself in place of the copy that another rank has sent."""
    return Group(samples=tuple(replace(sample, query=query) for sample in group.samples))
