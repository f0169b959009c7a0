"""A run under way: its parts, its clock, and what it records of each step."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.config import Recipe
from gspo.errors import RunError
from gspo.evaluation.held_out import evaluate
from gspo.evaluation.pass_at_1 import PassRate
from gspo.interrupt import Interrupt
from gspo.policy.optimizer import MAX_SKIPPED_IN_A_ROW
from gspo.policy.update import MiniBatchReport
from gspo.prepare import Prepared
from gspo.queries.order import query_indices
from gspo.records import Batch, Query
from gspo.report.diagnoses import WINDOW, diagnoses
from gspo.report.display import Display
from gspo.report.metrics import step_metrics
from gspo.report.run_directory import RunDirectory
from gspo.reward.score import Scored


@dataclass(kw_only=True)
class Run:
    """What the stages of one run share; the loop in train.py reads it, this file records."""

    recipe: Recipe
    parts: Prepared
    directory: RunDirectory
    display: Display
    interrupt: Interrupt
    lines: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    seconds: dict[str, float] = field(default_factory=dict)  # of the step under way, by stage
    diagnoses: dict[str, str] = field(default_factory=dict)  # every one named so far
    skipped_in_a_row: int = 0

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Time a stage of the step under way."""
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started

    def queries(self, step: int) -> list[Query]:
        """The step's queries, a function of step and seed alone."""
        everything = self.parts.queries.train
        indices = query_indices(
            step - 1,
            num_queries=len(everything),
            queries_per_step=self.recipe.rollout.queries_per_step,
            seed=self.recipe.seed,
            shuffle=self.recipe.queries.shuffle,
        )
        return [everything[index] for index in indices]

    def sampling_seed(self, step: int) -> int:
        """The sampler's seed of a step: far apart for neighbouring recipe seeds."""
        return (self.recipe.seed * 1_000_003 + step) % 2**63

    def record(
        self,
        step: int,
        batch: Batch,
        reports: Sequence[MiniBatchReport],
        *,
        scored: Scored,
    ) -> None:
        """Write a finished step to disk and screen.

        Raises RunError where updates have been skipped too often in a row.
        """
        recipe, trained = self.recipe, [item for report in reports for item in report.trained]
        metrics = step_metrics(batch, reports, self.seconds, scored=scored)
        line: dict[str, Any] = {"step": step, **metrics}
        self.display.step(step, line)
        due = recipe.evaluation.every and step % recipe.evaluation.every == 0
        if due or step == recipe.steps:
            line |= self._evaluation_metrics(step)
        self._append(line)
        if recipe.report.rollouts:
            self.directory.write_rollouts(step, batch, trained)
        if recipe.checkpoint.every and step % recipe.checkpoint.every == 0:
            self.directory.save_checkpoint(step, self.parts.policy, keep=recipe.checkpoint.keep)
        if step >= WINDOW or step == recipe.steps:
            self._name_diagnoses()
        self._stop_if_broken(step, batch, reports)

    def record_start(self) -> None:
        """Evaluate before the first step: line 0 of the metrics."""
        if not self.interrupt.requested and (metrics := self._evaluation_metrics(0)):
            self._append({"step": 0, **metrics})

    @property
    def set_name(self) -> str:
        """The name of the evaluated set in metric names."""
        path = self.recipe.evaluation.path
        return Path(path).stem if path else "held_out"

    def _evaluation_metrics(self, step: int) -> dict[str, float]:
        queries = self.parts.queries.held_out
        if not queries:
            return {}
        if step == 0:
            self.display.note(f"evaluating on {len(queries)} held-out queries …")
        rate: PassRate = evaluate(self.parts.policy, queries, self.parts.functions, self.recipe)
        score = f"{rate.pass_at_1:.3f} ± {rate.standard_error:.3f} on {rate.num_queries} held-out queries"
        self.display.note(f"pass@1 after step {step}: {score}" if step else f"pass@1 before GSPO: {score}")
        prefix = f"evaluation/{self.set_name}"
        return {
            f"{prefix}/pass_at_1": rate.pass_at_1,
            f"{prefix}/standard_error": rate.standard_error,
            f"{prefix}/mean_tokens": rate.mean_response_tokens,
            f"{prefix}/truncated_fraction": rate.truncated_fraction,
        }

    def _append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self.directory.append("metrics.jsonl", line)

    def _name_diagnoses(self) -> None:
        actor = self.recipe.actor
        steps = [line for line in self.lines if line["step"] > 0]
        level = actor.importance_sampling_level
        found = diagnoses(steps, level=level, mini_batches=actor.mini_batches)
        for name, sentence in found.items():
            if name not in self.diagnoses:
                self.display.note(f"diagnosis: {sentence}", style="yellow")
        self.diagnoses |= found

    def _stop_if_broken(self, step: int, batch: Batch, reports: Sequence[MiniBatchReport]) -> None:
        rollouts = (rollout for group in batch.groups for rollout in group.rollouts)
        if not all(rollout.sampler_logprobs.isfinite().all() for rollout in rollouts):
            raise RunError(
                f"step {step}: the policy's log-likelihoods are not finite: its weights are broken\n"
                "  mend: lower actor.optimizer.lr (or cold_start.optimizer.lr)"
            )
        for report in reports:
            if report.step.applied and not report.trained:
                continue  # nothing had an advantage: no sign of health
            self.skipped_in_a_row = 0 if report.step.applied else self.skipped_in_a_row + 1
            if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                trained = [item for report in reports for item in report.trained]
                where = self.directory.write_rollouts(step, batch, trained)
                raise RunError(
                    f"step {step}: loss or gradient was not finite in {self.skipped_in_a_row} updates in a row; "
                    f"the batch is in {where}\n  mend: lower actor.optimizer.lr, or look for extreme rewards"
                )
