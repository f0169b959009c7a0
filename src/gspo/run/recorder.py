"""What a run writes down of its steps: metrics, rollouts, evaluations, diagnoses, to disk and screen."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gspo.errors import DivergedError
from gspo.evaluation.held_out import evaluate
from gspo.learner.clip_range import next_scale
from gspo.learner.optimizer import MAX_SKIPPED_IN_A_ROW
from gspo.learner.sft import ColdStep
from gspo.metrics.diagnoses import WINDOW, diagnoses
from gspo.metrics.evaluation import evaluation_metrics, evaluation_summary, failure_summary
from gspo.metrics.numbers import Metrics
from gspo.metrics.step import step_metrics
from gspo.run.checkpoint.store import sha256
from gspo.run.progress import Progress
from gspo.run.rollout_lines import TokenText, rollout_lines
from gspo.run.run import Run
from gspo.types import Batch


class Recorder:
    """Writes what the steps of a run come to; `lines` are those of metrics.jsonl."""

    def __init__(self, run: Run) -> None:
        self.lines = run.directory.metrics()
        self._run, self._token_text = run, None
        if run.recipe.report.tokens:
            self._token_text = TokenText(partial(run.parts.policy.tokenizer.decode, skip_special_tokens=True))

    def cold_step(self, step: ColdStep, progress: Progress) -> Progress:
        """Write a supervised step, which is finished with it; DivergedError where too many in a row were skipped."""
        self._run.display.cold_step(step.step, step.loss)
        self._run.directory.append("cold_start.jsonl", vars(step))
        num_skipped = 0 if step.applied else progress.skipped_in_a_row + 1
        if num_skipped >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(
                f"cold start, step {step.step}: loss or gradient was not finite {num_skipped} times in a row\n"
                "  fix: lower cold_start.optimizer.lr"
            )
        return replace(progress, steps=step.step, skipped_in_a_row=num_skipped)

    def start(self) -> None:
        """Evaluate before the first step: line 0 of the metrics."""
        if not self.lines and (metrics := self._evaluate(0)):
            self._append({"step": 0, **metrics})

    def step(self, progress: Progress) -> Progress:
        """Write a step, which is finished with it; DivergedError where too many updates in a row were skipped."""
        run, recipe, batch = self._run, self._run.recipe, progress.batch
        assert batch is not None
        step, is_last = progress.steps + 1, progress.steps + 1 == recipe.steps
        seconds = {"checkpoint": 0.0, **run.clock.seconds}
        metrics = step_metrics(batch, progress.reports, seconds, actor=recipe.actor)
        line: dict[str, Any] = {"step": step, **metrics}
        run.display.step(step, line)
        if is_last or (recipe.evaluation.every and step % recipe.evaluation.every == 0):
            line |= self._evaluate(step)
        self._append(line)
        files = progress.rollout_files
        if recipe.report.rollouts:
            path = self._write_rollouts(step, batch)
            files = {**files, path.name: (path.stat().st_size, sha256(path))}
        named = progress.diagnoses
        if is_last or step >= WINDOW:
            named = self._diagnose(named)
        num_skipped = self._count_skipped(step, batch, progress)
        run.clock.seconds = {}
        return replace(
            progress,
            steps=step,
            skipped_in_a_row=num_skipped,
            diagnoses=named,
            rollout_files=files,
            clip_scale=next_scale(progress.clip_scale, recipe.actor, batch.samples),
            batch=None,
            reports=(),
        )

    def _evaluate(self, step: int) -> Metrics:
        run = self._run
        engine, queries, functions = run.parts.engine, run.parts.queries.held_out, run.parts.functions
        if not queries:
            return {}
        if step == 0:
            run.display.note(f"evaluating on {len(queries)} held-out queries …")
        with run.clock.stage("evaluation"):
            engine.publish(run.parts.policy, step * run.recipe.actor.mini_batches)
            score = evaluate(engine, queries, functions, run.recipe, check_stop=run.interrupt.check_stop)
        path = run.recipe.evaluation.path
        metrics = evaluation_metrics(score, Path(path).stem if path else "held_out")
        when = f"after step {step}" if step else f"before {run.recipe.actor.title}"
        run.display.note(f"pass@1 {when}: {evaluation_summary(score, metrics)}")
        if failures := failure_summary(score):
            run.display.note(f"warning: {failures}", style="yellow")
        return {**metrics, "time/evaluation_seconds": run.clock.seconds.pop("evaluation")}

    def _append(self, line: dict[str, Any]) -> None:
        line["time/elapsed_seconds"] = self._run.clock.elapsed
        self.lines.append(line)
        self._run.directory.append("metrics.jsonl", line)

    def _write_rollouts(self, step: int, batch: Batch) -> Path:
        return self._run.directory.write_rollouts(step, rollout_lines(batch.samples, self._token_text))

    def _diagnose(self, earlier: Mapping[str, str]) -> Mapping[str, str]:
        sentences = diagnoses([line for line in self.lines if line["step"] > 0], self._run.recipe.actor)
        for name, sentence in sentences.items():
            if name not in earlier:
                self._run.display.note(f"diagnosis: {sentence}", style="yellow")
        return {**earlier, **sentences}

    def _count_skipped(self, step: int, batch: Batch, progress: Progress) -> int:
        """The updates that are now skipped in a row; DivergedError where they are too many, or the weights broken."""
        if not all(sample.sampler_logprobs.isfinite().all() for sample in batch.samples):
            raise DivergedError(
                f"step {step}: the policy's log-likelihoods are not finite: its weights are broken\n"
                "  fix: lower actor.optimizer.lr (or cold_start.optimizer.lr)"
            )
        num_skipped = progress.skipped_in_a_row
        for report in progress.reports:
            if report.step.applied and not report.num_trained:
                continue  # nothing had an advantage: no sign of health
            num_skipped = 0 if report.step.applied else num_skipped + 1
            if num_skipped >= MAX_SKIPPED_IN_A_ROW:
                path = self._write_rollouts(step, batch)
                raise DivergedError(
                    f"step {step}: loss or gradient was not finite in {num_skipped} updates in a row; "
                    f"the batch is in {path}\n  fix: lower actor.optimizer.lr, or look for extreme rewards"
                )
        return num_skipped
