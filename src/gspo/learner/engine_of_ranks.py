"""The engine of a run on several ranks, as rank 0 sees it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace

from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.learner.trainer import Trainer
from gspo.loop import in_thread
from gspo.rollout.single_turn import WatchedResponse


class EngineOfRanks:
    """An engine that has all ranks sample, each with an embedded engine of its own, between two updates."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._description = trainer, trainer.make_engines()

    @property
    def num_tokens(self) -> int:
        """The number of tokens that rank 0 has sampled so far."""
        return self._trainer.num_tokens

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Future[Completion]]:
        """Have the prompts continued, as Engine has it."""
        futures = [Future[Completion]() for _ in prompts]
        in_thread("ranks", self._sample, prompts, sampling, futures)
        return futures

    def _sample(self, prompts: Sequence[Prompt], sampling: Sampling, futures: Sequence[Future[Completion]]) -> None:
        watched = prompts[0].is_complete if prompts else None
        strings = watched.strings.strings if isinstance(watched, WatchedResponse) else ()  # a tokenizer cannot travel
        if all(future.cancelled() for future in futures):  # the run ends, and the ranks may do so before this begins
            return
        try:
            bare = [replace(prompt, is_complete=None, session=None) for prompt in prompts]
            for future, completion in zip(futures, self._trainer.sample(bare, sampling, strings), strict=True):
                with suppress(InvalidStateError):  # it is given up
                    future.set_result(completion)
        except BaseException as error:
            for future in futures:
                with suppress(InvalidStateError):
                    future.set_exception(error)

    def publish(self, version: int) -> None:
        """Have the engines sample with the present weights."""
        self._trainer.publish(version)

    def describe(self) -> Mapping[str, str]:
        """The engines' own description."""
        return self._description

    def take_metrics(self) -> Mapping[str, float]:
        """Return nothing: an embedded engine measures nothing."""
        return {}

    def close(self) -> None:
        """Do nothing: the engines end with their processes."""
