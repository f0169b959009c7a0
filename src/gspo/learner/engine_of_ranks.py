"""The engine of several ranks: rank 0 asks it, and all ranks take part in what it is asked."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from signal import Signals

from gspo.engine.engine import Completion, Engine, Prompt, Sampling, in_groups
from gspo.errors import RunError, Stopped
from gspo.model.policy import Policy
from gspo.model.sharding import unsharded
from gspo.ranks import ask_others, from_first, gathered, meet, num_ranks, rank
from gspo.rollout.stop_strings import StopStrings, WatchedResponse

_LOOK_SECONDS = 0.05  # between two looks at whether the run is to stop


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What all ranks are to sample."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    stop_strings: Sequence[str]  # of each rank's own tokenizer, for some cannot travel


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
        self._version = -1  # that all ranks hold whole
        self._is_embedded = is_embedded
        self._asking: threading.Thread | None = None  # that has the ranks sample
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

    @property
    def num_tokens(self) -> int:
        """The number of tokens that this rank has sampled so far."""
        return self._own.num_tokens if self._own else 0

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Future[Completion]]:
        """Have the prompts continued, as Engine has it; rank 0 calls it."""
        assert self._own is not None
        if not self._is_embedded:
            return self._own.submit(prompts, sampling)
        futures = [Future[Completion]() for _ in prompts]
        self._asking = threading.Thread(target=self._ask, args=(prompts, sampling, futures), name="ranks", daemon=True)
        self._asking.start()
        return futures

    def _ask(self, prompts: Sequence[Prompt], sampling: Sampling, futures: Sequence[Future[Completion]]) -> None:
        watched = prompts[0].is_complete if prompts else None
        strings = watched.strings.strings if isinstance(watched, WatchedResponse) else ()
        bare = [replace(prompt, is_complete=None) for prompt in prompts]
        request = _Request(prompts=bare, sampling=sampling, stop_strings=strings)
        try:
            ask_others(request)
            shares = [iter(share) for share in self._sample(request)]
            for place, group in enumerate(in_groups(prompts)):
                for number in group:
                    with suppress(InvalidStateError):  # it is given up
                        futures[number].set_result(next(shares[place % num_ranks()]))
        except BaseException as error:
            for future in futures:
                with suppress(InvalidStateError):
                    future.set_exception(error)

    def help_with(self, asked: _Request | int | str | None) -> None:
        """What the other ranks do when rank 0 samples or publishes: a number is the version of the weights."""
        if isinstance(asked, _Request):
            self._sample(asked)
        elif isinstance(asked, int):
            self._hold(asked)
        else:
            self._policy.take_part(asked)

    def _sample(self, request: _Request) -> list[Sequence[Completion]]:
        """What every rank has sampled. Rank 0 raises its own error, or the first of another's, and tells it to all."""
        assert self._own is not None
        completions: Sequence[Completion] = ()
        failure: BaseException | None = None
        mine = in_groups(request.prompts)[rank() :: num_ranks()]
        try:
            prompts = [request.prompts[number] for group in mine for number in group]
            if request.stop_strings:
                strings = StopStrings(self._policy.tokenizer, request.stop_strings)
                prompts = [replace(prompt, is_complete=WatchedResponse(strings, prompt.ids)) for prompt in prompts]
            futures = self._own.submit(prompts, request.sampling)
            completions = self._completed(futures)
        except (Exception, KeyboardInterrupt) as error:  # Stopped is one of the latter
            failure = error
        meet()
        signal = int(failure.args[0]) if isinstance(failure, Stopped) else None
        results = gathered((completions, signal, failure and f"{type(failure).__name__}: {failure}"))
        if rank() == 0:
            if failure is not None:
                raise failure
            for other, (_, number, text) in enumerate(results):
                if number is not None:
                    raise Stopped(Signals(number))
                if text is not None:
                    raise RunError(f"rank {other} could not sample: {text}")
        return [sampled for sampled, _, _ in results]

    def _completed(self, futures: Sequence[Future[Completion]]) -> list[Completion]:
        pending = {*futures}
        try:
            while pending:
                _, pending = wait(pending, _LOOK_SECONDS)
                self._check_stop()
            return [future.result() for future in futures]
        finally:
            for future in pending:
                future.cancel()

    def publish(self, version: int) -> None:
        """Have the engine sample with the present weights; rank 0 calls it."""
        if not self._is_embedded:
            assert self._own is not None
            self._own.publish(version)
        elif version != self._version:
            ask_others(version)
            self._hold(version)

    def _hold(self, version: int) -> None:
        """Have the whole model on this rank, for its engine to sample with."""
        assert self._own is not None
        self._held.close()
        self._held.enter_context(unsharded(self._policy.model))
        self._own.publish(version)
        self._version = version

    def wait(self) -> None:
        """Return once the ranks sample no more: rank 0 may then tell the others something else, such as its error."""
        if self._asking is not None:
            self._asking.join()

    def release(self) -> None:
        """Share the model among the ranks again: before it is trained."""
        self._held.close()
        self._version = -1

    def describe(self) -> Mapping[str, str]:
        """The engine's own description."""
        return self._description

    def take_metrics(self) -> Mapping[str, float]:
        """What the engine of this rank has measured since the last call."""
        return self._own.take_metrics() if self._own else {}

    def close(self) -> None:
        """End the engine."""
        if self._own:
            self._own.close()
