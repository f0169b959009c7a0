"""What a run writes down of its steps: metrics, rollouts, evaluations, diagnoses, to disk and screen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
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
from gspo.run.checkpoint.files import sha256
from gspo.run.progress import Progress
from gspo.run.rollout_lines import TokenText, rollout_lines
from gspo.run.run import Run

_NOT_FINITE = f"loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} updates in a row"


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
        counts = _skipped_in_a_row(progress, [step.applied])
        if max(counts) >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(f"cold start, step {step.step}: {_NOT_FINITE}\n  fix: lower cold_start.optimizer.lr")
        return replace(progress, steps=step.step, skipped_in_a_row=counts[-1])

    def start(self) -> None:
        """Evaluate before the first step: line 0 of the metrics."""
        if not self.lines and (metrics := self._evaluate(0)):
            self._append({"step": 0, **metrics})

    def step(self, progress: Progress) -> Progress:
        """Write a step, which is finished with it; DivergedError where the run cannot go on from it."""
        run, recipe, batch, step = self._run, self._run.recipe, progress.batch, progress.steps + 1
        assert batch is not None
        seconds, is_last = {"checkpoint": 0.0, **run.clock.seconds}, step == recipe.steps
        line: dict[str, Any] = {"step": step, **step_metrics(batch, progress.reports, seconds, recipe.actor)}
        run.display.step(step, line)
        if is_last or (recipe.evaluation.every and step % recipe.evaluation.every == 0):
            line |= self._evaluate(step)
        self._append(line)
        # Where nothing had an advantage, an update that was made is no sign of health.
        applied = [report.step.applied for report in progress.reports if report.num_trained or not report.step.applied]
        counts, files = _skipped_in_a_row(progress, applied), progress.rollout_files
        has_diverged = max(counts) >= MAX_SKIPPED_IN_A_ROW
        if recipe.report.rollouts or has_diverged:
            path = run.directory.write_rollouts(step, rollout_lines(batch.samples, self._token_text))
            files = {**files, path.name: (path.stat().st_size, sha256(path))}
        named = self._diagnose(progress.diagnoses) if is_last or step >= WINDOW else progress.diagnoses
        if not all(sample.sampler_logprobs.isfinite().all() for sample in batch.samples):
            raise DivergedError(
                f"step {step}: the policy's log-likelihoods are not finite: its weights are broken\n"
                "  fix: lower actor.optimizer.lr (or cold_start.optimizer.lr)"
            )
        if has_diverged:
            fix = "lower actor.optimizer.lr, or look for extreme rewards"
            raise DivergedError(f"step {step}: {_NOT_FINITE}; the batch is in {path}\n  fix: {fix}")
        run.clock.seconds = {}
        return replace(
            progress,
            steps=step,
            skipped_in_a_row=counts[-1],
            diagnoses=named,
            rollout_files=files,
            clip_scale=next_scale(progress.clip_scale, recipe.actor, batch.samples),
            batch=None,
            reports=(),
        )

    def _evaluate(self, step: int) -> Metrics:
        run, parts = self._run, self._run.parts
        if not (queries := parts.queries.held_out):
            return {}
        if step == 0:
            run.display.note(f"evaluating on {len(queries)} held-out queries …")
        with run.clock.stage("evaluation"):
            parts.engine.publish(parts.policy, step * run.recipe.actor.mini_batches)
            score = evaluate(parts.engine, queries, parts.functions, run.recipe, check_stop=run.interrupt.check_stop)
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

    def _diagnose(self, earlier: Mapping[str, str]) -> Mapping[str, str]:
        """The earlier diagnoses and those of now, of which the new ones are shown."""
        sentences = diagnoses([line for line in self.lines if line["step"] > 0], self._run.recipe.actor)
        for name, sentence in sentences.items():
            if name not in earlier:
                self._run.display.note(f"diagnosis: {sentence}", style="yellow")
        return {**earlier, **sentences}


def _skipped_in_a_row(progress: Progress, applied: Sequence[bool]) -> list[int]:
    """How many updates in a row have been skipped, before the first of these updates and after each of them."""
    counts = accumulate(applied, lambda count, ok: 0 if ok else count + 1, initial=progress.skipped_in_a_row)
    return list(counts)
