"""A run under way: its parts, its clock, and what it records of each step."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from gspo.errors import RunError
from gspo.learner.critic import Critic
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import MiniBatchReport
from gspo.queries.order import query_indices
from gspo.recipe.load import dump_recipe
from gspo.recipe.schema import Recipe
from gspo.run.checkpoint.random_state import random_state
from gspo.run.checkpoint.snapshot import Snapshot, take_snapshot
from gspo.run.checkpoint.writer import Writer
from gspo.run.console import Display
from gspo.run.directory import RunDirectory, how_to_resume
from gspo.run.interrupt import Interrupt
from gspo.run.prepare import Prepared
from gspo.run.progress import Progress
from gspo.run.token_text import TokenText
from gspo.types import Batch, Query

T = TypeVar("T")


@dataclass(kw_only=True)
class Run:
    """What the stages of one run share; the loop in train.py reads it, this file records."""

    recipe: Recipe
    parts: Prepared
    directory: RunDirectory
    display: Display
    interrupt: Interrupt
    writer: Writer
    progress: Progress
    lines: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    optimizer: Optimizer | None = None  # of the phase under way
    optimizer_state: Mapping[str, Tensor] = field(default_factory=dict)  # of a resumed phase, until it has begun
    critic: Critic | None = None  # a value model, where reinforcement learning has one
    critic_state: Mapping[str, Tensor] = field(default_factory=dict)  # the same of it
    seconds: dict[str, float] = field(default_factory=dict)  # of the step under way, by stage
    started: float = field(default_factory=time.monotonic)
    random: Mapping[str, Tensor] = field(default_factory=random_state)  # at the last safe point, as are the next two
    log_bytes: Mapping[str, int] = field(default_factory=dict)
    steps_taken: int | None = None  # by the optimiser
    new_rollouts: tuple[Path, ...] = ()  # files written since the last checkpoint
    about: Mapping[str, Any] = field(default_factory=dict)  # what the manifests of its checkpoints say
    token_text: TokenText | None = None  # where rollouts are written token by token

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Time a stage of the step under way; what it took before a resume counts too."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def stage(self, name: str, compute: Callable[[], T]) -> T:
        """What the stage has given already, in a resumed step; else compute it, and it is in hand."""
        if (known := getattr(self.progress.in_hand, name)) is not None:
            return cast(T, known)
        with self.interrupt.may_stop(), self.clock(name):
            found = compute()
        setattr(self.progress.in_hand, name, found)
        self.reached()
        return found

    def updates(self, steps: Iterator[tuple[MiniBatchReport, Batch]]) -> tuple[Batch, Sequence[MiniBatchReport]]:
        """Take the optimiser steps that remain of this step; its trained batch, and the reports of all of them."""
        hand = self.progress.in_hand
        while True:
            with self.clock("update"):
                report, batch = next(steps, (None, hand.likelihood))
            assert batch is not None
            if report is None:
                return batch, hand.reports
            hand.reports, hand.likelihood = (*hand.reports, report), batch
            self.reached()

    def reached(self) -> None:
        """A safe point, the state having moved on: save where that is due, stop where that is asked.

        Raises RunError where an earlier checkpoint could not be written, and Stopped.
        """
        self.random = random_state()
        self.steps_taken = None if self.optimizer is None else self.optimizer.steps_taken
        self.log_bytes = self.directory.log_bytes()
        self.writer.raise_failure()
        if self.writer.is_due(self.progress.position):
            self.save()
        if self.progress.steps < self.recipe.steps:  # else only the final model is left, which is written all the same
            self.interrupt.check()

    def save(self) -> None:
        """Have the state of the last safe point written, in the background; RunError where that cannot be."""
        self.directory.check_lock()
        with self.clock("checkpoint"):
            self.progress.in_hand.seconds = dict(self.seconds)
            self.writer.save(self.progress.position, self._snapshot)

    def save_and_wait(self) -> Path:
        """Save the state of the last safe point and wait until it is on the disk; says how to go on from it."""
        try:
            self.writer.wait()
        except RunError as error:  # of an earlier one: this one may well be written
            self.display.note(str(error))
        self.save()
        self.writer.wait()
        self.display.stop()
        self.display.note(f"saved: {self.progress.position}")
        self.note_resume()
        return self.writer.store.path(self.progress.position)

    def save_if_whole(self) -> None:
        """As `save_and_wait`, on the way out of an error; says why where there is nothing that could be saved."""
        if self.optimizer is not None and self.optimizer.steps_taken != self.steps_taken:
            self.display.note("the error came between an optimiser step and its record: this state is not saved")
            return self.settle()
        try:
            self.save_and_wait()
        except RunError as error:  # the one under way is what is to be heard of first
            self.display.note(str(error))
            self.note_resume()

    def settle(self) -> None:
        """On the way out of a state that is not worth saving: have the last one that is written to its end."""
        try:
            self.writer.wait()
        except RunError as error:
            self.display.note(str(error))
        self.note_resume()

    def finish(self) -> Path:
        """The last checkpoint and the final model, written; where the model lies."""
        self.save()
        self.writer.wait()
        self.directory.save_model(self.parts.policy)
        return self.directory.model

    @property
    def temperature(self) -> float:
        """Of the distribution that is sampled, and so of every likelihood."""
        return self.recipe.rollout.temperature

    def note_resume(self) -> None:
        """Say how a run that ends here goes on."""
        self.display.stop()
        self.display.note(f"to go on: {how_to_resume(self.recipe)}")

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, those before a resume too."""
        return self.progress.seconds + time.monotonic() - self.started

    @property
    def stopped_by(self) -> int | None:
        """The signal that ended the run before its last step."""
        signal = self.interrupt.signal
        return None if signal is None or self.progress.steps >= self.recipe.steps else int(signal)

    def _snapshot(self) -> Snapshot:
        rollouts, self.new_rollouts = self.new_rollouts, ()
        return take_snapshot(
            policy=self.parts.policy,
            optimizer=self.optimizer,
            critic=self.critic,
            progress=replace(self.progress, seconds=self.elapsed),
            random=self.random,
            home=self.directory.path,
            rollouts=rollouts,
            log_bytes=self.log_bytes,
            recipe=dump_recipe(self.recipe),
            about=self.about,
        )

    def queries(self, step: int, round_number: int = 0) -> list[Query]:
        """The queries of a step's round: the next in the order, which every round there was has moved on."""
        everything = self.parts.queries.train
        indices = query_indices(
            step - 1 + self.progress.extra_rounds + round_number,
            num_queries=len(everything),
            queries_per_step=self.recipe.rollout.queries_per_step,
            seed=self.recipe.seed,
            shuffle=self.recipe.queries.shuffle,
        )
        return [everything[index] for index in indices]

    def count_update(self, *, applied: bool) -> int:
        """How many updates in a row have now been skipped."""
        self.progress.skipped_in_a_row = 0 if applied else self.progress.skipped_in_a_row + 1
        return self.progress.skipped_in_a_row
