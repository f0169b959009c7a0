"""What a run writes down of its steps: metrics, rollouts, evaluations, diagnoses, to disk and screen."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.errors import DivergedError
from gspo.evaluation.held_out import evaluate
from gspo.learner.clip_range import next_scale
from gspo.learner.optimizer import MAX_SKIPPED_IN_A_ROW
from gspo.learner.sft import ColdStep
from gspo.learner.update import MiniBatchReport
from gspo.metrics.diagnoses import WINDOW, diagnoses
from gspo.metrics.evaluation import evaluation_metrics, evaluation_summary, failure_summary
from gspo.metrics.numbers import Metrics
from gspo.metrics.step import step_metrics
from gspo.run.checkpoint.files import sha256
from gspo.run.progress import InHand
from gspo.run.rollout_lines import rollout_lines
from gspo.run.run import Run
from gspo.types import Batch


def record_cold_step(run: Run, done: ColdStep) -> None:
    """Write a supervised step; DivergedError where too many in a row were skipped."""
    run.display.cold_step(done.step, done.loss)
    run.directory.append("cold_start.jsonl", vars(done))
    run.progress.cold_steps = done.step
    if run.count_update(applied=done.applied) >= MAX_SKIPPED_IN_A_ROW:
        raise DivergedError(
            f"cold start, step {done.step}: loss or gradient was not finite {MAX_SKIPPED_IN_A_ROW} times in a row\n"
            "  fix: lower cold_start.optimizer.lr"
        )


def record_start(run: Run) -> None:
    """Evaluate before the first step: line 0 of the metrics."""
    if not run.lines and (metrics := _evaluation_metrics(run, 0)):
        _append(run, {"step": 0, **metrics})
        run.reached()


def record_step(run: Run, step: int, batch: Batch, reports: Sequence[MiniBatchReport]) -> None:
    """Write a finished step, which ends it; DivergedError where too many updates in a row were skipped."""
    recipe, seconds = run.recipe, {"checkpoint": 0.0, **run.seconds}
    line: dict[str, Any] = {"step": step, **step_metrics(batch, reports, seconds, actor=recipe.actor)}
    run.display.step(step, line)
    is_due = recipe.evaluation.every and step % recipe.evaluation.every == 0
    if is_due or step == recipe.steps:
        line |= _evaluation_metrics(run, step)
    _append(run, line)
    files = run.progress.rollout_files
    if recipe.report.rollouts:
        path = run.directory.write_rollouts(step, rollout_lines(batch.samples, run.token_text))
        run.new_rollouts = (*run.new_rollouts, path)
        files = {**files, path.name: (path.stat().st_size, sha256(path))}
    if step >= WINDOW or step == recipe.steps:
        _name_diagnoses(run)
    _stop_if_broken(run, step, batch, reports)
    progress = run.progress
    scale = next_scale(progress.clip_scale, recipe.actor, batch.samples)
    run.progress = replace(
        progress,
        steps=step,
        extra_rounds=progress.extra_rounds + len(progress.in_hand.rounds),
        rollout_files=files,
        clip_scale=scale,
        in_hand=InHand(),
    )
    run.seconds = {}
    run.reached()


def _evaluation_metrics(run: Run, step: int) -> Metrics:
    queries = run.parts.queries.held_out
    if not queries:
        return {}
    if step == 0:
        run.display.note(f"evaluating on {len(queries)} held-out queries …")
    with run.interrupt.may_stop(), run.clock("evaluation"):
        run.parts.engine.publish(run.parts.policy, run.steps_taken or 0)
        score = evaluate(run.parts.engine, queries, run.parts.functions, run.recipe, check_stop=run.interrupt.check)
    path = run.recipe.evaluation.path
    metrics = evaluation_metrics(score, Path(path).stem if path else "held_out")
    when = f"after step {step}" if step else f"before {run.recipe.actor.title}"
    run.display.note(f"pass@1 {when}: {evaluation_summary(score, metrics)}")
    if failures := failure_summary(score):
        run.display.note(f"warning: {failures}", style="yellow")
    return {**metrics, "time/evaluation_seconds": run.seconds.pop("evaluation")}


def _append(run: Run, line: dict[str, Any]) -> None:
    line["time/elapsed_seconds"] = run.elapsed
    run.lines.append(line)
    run.directory.append("metrics.jsonl", line)


def _name_diagnoses(run: Run) -> None:
    named = diagnoses([line for line in run.lines if line["step"] > 0], run.recipe.actor)
    for name, sentence in named.items():
        if name not in run.progress.diagnoses:
            run.display.note(f"diagnosis: {sentence}", style="yellow")
    run.progress.diagnoses = {**run.progress.diagnoses, **named}


def _stop_if_broken(run: Run, step: int, batch: Batch, reports: Sequence[MiniBatchReport]) -> None:
    if not all(sample.sampler_logprobs.isfinite().all() for sample in batch.samples):
        raise DivergedError(
            f"step {step}: the policy's log-likelihoods are not finite: its weights are broken\n"
            "  fix: lower actor.optimizer.lr (or cold_start.optimizer.lr)"
        )
    for report in reports:
        if report.step.applied and not report.num_trained:
            continue  # nothing had an advantage: no sign of health
        if run.count_update(applied=report.step.applied) >= MAX_SKIPPED_IN_A_ROW:
            where = run.directory.write_rollouts(step, rollout_lines(batch.samples, run.token_text))
            raise DivergedError(
                f"step {step}: loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} updates in a row; "
                f"the batch is in {where}\n  fix: lower actor.optimizer.lr, or look for extreme rewards"
            )
