"""What a run writes down of its steps: metrics, rollouts, evaluations, diagnoses, to disk and screen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import isfinite, nan
from typing import Any

import torch
from jaxtyping import Float
from tokenizers.decoders import DecodeStream
from torch import Tensor

from gspo.errors import DivergedError, Stopped
from gspo.evaluation.held_out import evaluate, shown_columns
from gspo.interrupt import check_stop
from gspo.learner.clip_range import next_scale
from gspo.learner.optimizer import MAX_SKIPPED_IN_A_ROW, StepReport
from gspo.metrics.numbers import Metrics
from gspo.metrics.staleness import source_metrics, staleness_metrics
from gspo.metrics.step import curriculum_metrics, evaluation_metrics, step_metrics
from gspo.metrics.words import WINDOW, diagnoses, early_diagnoses
from gspo.model.load import turn_marks
from gspo.queries.order import remembered
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ActorConfig
from gspo.run.hooks import call_hooks, fault_of
from gspo.run.plain_files import EVALUATION
from gspo.run.progress import Progress, next_best, next_phases, reason_to_stop
from gspo.run.run import Run
from gspo.run.summary import evaluation_summary, failure_summary, step_line
from gspo.types import Query, Sample, Turn

_PARTIAL = "\N{REPLACEMENT CHARACTER}"  # a part of a character decodes to it
_DIGITS = 4  # significant ones, of a token's number: clip ranges are of any size
_BROKEN = (
    "the policy's log-likelihoods are not finite: its weights are broken\n"
    "  fix: lower actor.optimizer.lr (or cold_start.optimizer.lr)"
)
# Nats a token by which the embedded engine may differ in step 1. In float32 both differ by rounding, less than 1e-4.
_MAX_GAP = 1e-2
_NOT_FINITE = f"loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} updates in a row"


def check_gap(line: Mapping[str, Any]) -> None:
    """DivergedError where the embedded engine differs from the policy, by the metrics of the first step in float32."""
    # Where the engine's own numbers are π_old, the first is 0, and the second compares them with the policy's.
    gap = max(line["mismatch/logprob_gap_mean"], line["ratio/mismatch_log_std"])
    if gap > _MAX_GAP:
        what = f"step 1: the embedded engine's log-likelihoods differ from the policy's by {gap:.3g} nats a token"
        why = f"in float32 more than {_MAX_GAP:g} is no rounding: it samples from another distribution"
        fix = "take another rollout.engine or model, and report this one, with its config.json, as a fault of gspo"
        raise DivergedError(f"{what}; {why}\n  fix: {fix}")


class Recorder:
    """The writer of a run's steps; `lines` are those of metrics.jsonl."""

    def __init__(self, run: Run) -> None:
        self.lines = run.directory.metrics()
        self._run = run
        self._tokenizer = run.trainer.policy.tokenizer if run.recipe.report.tokens else None

    def cold_step(self, loss: float, report: StepReport, progress: Progress) -> Progress:
        """Write a supervised step, which is finished with it; DivergedError where too many in a row were skipped."""
        step = progress.steps + 1
        self._run.display.step(step, f"loss {loss:.3f}")
        line = {"step": step, "loss": loss, "learning_rate": report.learning_rate, "applied": report.applied}
        self._run.directory.append("cold_start.jsonl", line)
        counts = _skipped_in_a_row(progress, [report.applied])
        if max(counts) >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(f"cold start, step {step}: {_NOT_FINITE}\n  fix: lower cold_start.optimizer.lr")
        return replace(progress, steps=step, skipped_in_a_row=counts[-1])

    def start(self, progress: Progress) -> Progress:
        """Evaluate before the first step: line 0 of the metrics."""
        if self.lines or not (metrics := self._evaluate(0)):
            return progress
        line = {"step": 0, **metrics}
        progress = self._watched(progress, line)
        self._append(line)
        return progress

    def step(self, recipe: Recipe, progress: Progress) -> Progress:
        """Write a step of the recipe of now, which is finished with it; DivergedError where the run cannot go on."""
        run, batch, step = self._run, progress.batch, progress.steps + 1
        assert batch is not None
        seconds = {"checkpoint": 0.0, **run.clock.seconds}
        sampling = "total" if recipe.rollout.max_staleness else "rollout"
        marks = turn_marks(run.trainer.policy.tokenizer, recipe.queries)
        metrics = step_metrics(batch, progress.reports, seconds, recipe.actor, sampling, marks)
        if recipe.rollout.max_staleness or batch.num_too_old:  # also where a resume has lowered it to 0
            metrics |= staleness_metrics(batch, updates_per_step=recipe.actor.updates_per_step)
            most = min(recipe.rollout.max_staleness, recipe.steps - step) * recipe.rollout.queries_per_step
            # What is ahead beyond that is the rest of a batch of the order, which is not asked for yet.
            metrics |= source_metrics(run.progress.ahead[:most], run.source.timeline() if run.source else None)
        line: dict[str, Any] = {"step": step, **metrics, **run.engine.take_metrics()}
        if recipe.phases:
            line["phase"] = recipe.num_begun(step, progress.phases_begun)
        if recipe.queries.sampler == "difficulty":
            sampled, threshold = [*batch.groups, *batch.dropped], recipe.evaluation.pass_threshold
            rates = remembered(progress.pass_rates, sampled, threshold=threshold, step=step)
            progress = replace(progress, pass_rates=rates)
            line |= curriculum_metrics(rates, len(run.parts.queries.train))
        run.display.step(step, step_line(line))
        if step == recipe.steps or (recipe.evaluation.every and step % recipe.evaluation.every == 0):
            line |= self._evaluate(step)
        after = self._hooked(progress, line, batch.samples, progress.sampling(recipe.rollout).temperature)
        is_last = after.is_over(recipe.steps)
        self._append(line)
        # Where nothing had an advantage, an update that was made is no sign of health.
        applied = [report.step.applied for report in progress.reports if report.num_trained or not report.step.applied]
        counts = _skipped_in_a_row(progress, applied)
        has_diverged = max(counts) >= MAX_SKIPPED_IN_A_ROW
        if recipe.report.rollouts or has_diverged:
            path = run.directory.write_rollouts(step, rollout_lines(batch.samples, self._tokenizer))
        named = self._diagnose(recipe.actor, progress.diagnoses, is_early=not is_last and step < WINDOW)
        if not all(sample.sampler_logprobs.isfinite().all() for sample in batch.samples):
            raise DivergedError(f"step {step}: {_BROKEN}")
        if step == 1 and recipe.rollout.engine == "embedded" and run.trainer.policy.dtype == torch.float32:
            check_gap(line)
        if has_diverged:
            fix = "lower actor.optimizer.lr, or look for extreme rewards"
            raise DivergedError(f"step {step}: {_NOT_FINITE}; the batch is in {path}\n  fix: {fix}")
        run.clock.seconds = {}
        return replace(
            after,
            skipped_in_a_row=counts[-1],
            diagnoses=named,
            clip_scale=next_scale(progress.clip_scale, recipe.actor, batch.samples),
            batch=None,
            reports=(),
        )

    def _hooked(
        self, progress: Progress, line: dict[str, Any], samples: Sequence[Sample], temperature: float
    ) -> Progress:
        """Call the hooks, log what they log, and note what they set; the step is finished with it."""
        progress, stop, parts, clock = replace(progress, steps=line["step"]), None, self._run.parts, self._run.clock
        if parts.hooks:
            line["policy/learning_rate_factor"] = progress.learning_rate_factor
            line["policy/temperature"] = temperature
            line["time/elapsed_seconds"] = clock.elapsed
            with clock.stage("hooks"):
                lines = partial(rollout_lines, samples, self._tokenizer)
                action = call_hooks(parts.hooks, line, lambda: [*lines()], self._hook_failed)
            line |= {f"hook/{name}": value for name, value in action.log.items()}
            line["time/hooks_seconds"] = clock.seconds.pop("hooks")
            stop = action.stop
            progress = replace(progress, **action.model_dump(exclude_none=True, exclude={"log", "stop"}))
        return self._watched(progress, line, stop)

    def _hook_failed(self, name: str, error: BaseException) -> None:
        if isinstance(error, Stopped):  # of an evaluation within the hook
            raise error
        if isinstance(error, KeyboardInterrupt):
            check_stop()  # a second signal ends a hook that hangs: the state is whole, and saved
        fault = fault_of(name, error, self._run.parts.hooks[name])
        if self._run.recipe.hook_errors == "end":
            raise fault from None
        self._run.warn_once(f"hook {name}", f"{fault.where} {fault.what}; no further error of it is shown")

    def _watched(self, progress: Progress, line: dict[str, Any], stop: str | None = None) -> Progress:
        """Note the best values so far and whether the run ends here, where the model is evaluated a last time."""
        run, recipe, step = self._run, self._run.recipe, line["step"]
        before, settings = progress.early_stop, recipe.early_stop
        if progress.ended and before:  # and goes on, with other steps: with patience from now on
            before = replace(before, misses=0)
        early = next_best(before, line, settings.metric, settings.best_is, settings.min_improvement)
        stop = stop or reason_to_stop(early, line, settings)
        ended = (stop, recipe.steps) if stop and step < recipe.steps else None
        if ended:
            run.display.note(f"ends after step {step}: {stop}")
            if not any(name.startswith("evaluation/") for name in line):
                line |= self._evaluate(step)
        best = next_best(progress.best, line, recipe.checkpoint.best, recipe.checkpoint.best_is)
        progress = next_phases(progress, recipe, line)
        return replace(progress, early_stop=early, best=best, ended=ended)

    def _evaluate(self, step: int) -> Metrics:
        """Evaluate on every set, one after the other; their responses are in one file."""
        run, parts = self._run, self._run.parts
        if not parts.evaluation_sets:
            return {}
        metrics, samples = Metrics(), dict[str, Sequence[Sample]]()
        when = f"after step {step}" if step else f"before {run.recipe.actor.title}"
        with run.clock.stage("evaluation"):
            version = step * run.recipe.actor.updates_per_step
            run.sampler.publish(version)
            for eval_set in parts.evaluation_sets:
                if step == 0:
                    number = len(eval_set.queries)
                    queries = "1 query" if number == 1 else f"{number:,} queries"
                    run.display.note(f"evaluating on {queries} of {eval_set.name} …")
                state, name = run.trainer_state(step), eval_set.name
                numbers, batch = evaluate(run.sampler, eval_set, state, show_progress=run.display.progress)
                own = evaluation_metrics(numbers, batch.logged, name)
                metrics |= {**own, f"evaluation/{name}/policy_version": float(version)}
                samples[name] = batch.samples
                run.display.note(f"pass@1 {when}: {evaluation_summary(numbers, own, name)}")
                if failures := failure_summary(numbers, name):
                    run.display.note(f"warning: {failures}", style="yellow")
        if run.recipe.report.rollouts:
            lines = (
                {"set": name, **line} for name, set_samples in samples.items() for line in rollout_lines(set_samples)
            )
            run.directory.write_rollouts(step, lines, folder=EVALUATION)
        return {**metrics, "time/evaluation_seconds": run.clock.seconds.pop("evaluation")}

    def _append(self, line: dict[str, Any]) -> None:
        line["time/elapsed_seconds"] = self._run.clock.elapsed
        self.lines.append(line)
        self._run.directory.append("metrics.jsonl", line)

    def _diagnose(self, actor: ActorConfig, earlier: Mapping[str, str], *, is_early: bool = False) -> Mapping[str, str]:
        """The earlier diagnoses and those of now, of which the new ones are shown."""
        find = early_diagnoses if is_early else diagnoses
        sentences = find([line for line in self.lines if line["step"] > 0], actor)
        self._run.display.just_shown = [name for name in sentences if name not in earlier]
        for name in self._run.display.just_shown:
            self._run.display.note(f"diagnosis: {sentences[name]}", style="yellow")
        return {**earlier, **sentences}


def _skipped_in_a_row(progress: Progress, applied: Sequence[bool]) -> list[int]:
    """Return how many updates in a row have been skipped, before the first of these updates and after each of them."""
    return list(accumulate(applied, lambda count, ok: 0 if ok else count + 1, initial=progress.skipped_in_a_row))


def token_characters(tokenizer: Any, sample: Sample) -> list[int] | None:
    """Return how many characters of a response's text each token makes; they add up to the text.

    What a token begins that ends within a character belongs to the token that makes it whole; a token that ends
    the response may have none. None if the text is not that of the tokens in a row, or the tokenizer is written in
    Python.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    stream = DecodeStream(ids=[*sample.query.prompt_ids[-1:]])  # before the first word a space may be left out
    try:
        pieces = [stream.step(backend, token) or "" for token in sample.token_ids.tolist()]
    except Exception:  # the package's own: a longer text does not begin with the shorter one
        return None
    rest = sample.text.removeprefix("".join(pieces[:-1]))
    if "".join(pieces) != sample.text and not rest.strip(_PARTIAL):  # nothing, or a part of a character
        is_end = bool(pieces.pop())  # its text is not the response's
        pieces = [*pieces[:-1], "".join(pieces[-1:]) + rest, ""] if is_end and pieces else [*pieces, rest]
    return [*map(len, pieces)] if "".join(pieces) == sample.text else None


def rollout_lines(samples: Sequence[Sample], tokenizer: Any = None) -> Iterator[Mapping[str, Any]]:
    """Yield a line for each sample; a `tokenizer` adds the numbers of each token to it.

    Numbers of the update are null where the sample was not trained on, its advantage being 0.
    """
    for sample in samples:
        score, stats = sample.score, sample.stats
        line: dict[str, Any] = {
            "query": sample.query.id,
            "prompt": sample.query.text,
            **({"prompt_words": words} if (words := _words(sample.query)) else {}),
            "columns": shown_columns(sample.query),
            "completion": sample.text,
            "reward": sample.reward,
            "rewards": dict(score.parts) if score else {},
            **({"extra": dict(score.extra)} if score and score.extra else {}),
            "failure": score.failure.message if score and score.failure else None,
            "advantage": sample.advantage,
            "sequence_ratio": stats and stats.sequence_ratio,
            "clipped": stats and stats.num_clipped / stats.num_tokens,
            "mini_batch": stats and stats.mini_batch,
            "tokens": sample.num_tokens,
            "finish_reason": sample.finish_reason,
            **({"turns": [*map(_turn, sample.turns)]} if sample.turns else {}),
            **({"starts": [*sample.starts]} if any(sample.starts) else {}),
            "policy_version": sample.versions[0][0],  # the oldest that wrote tokens of it
            **({"versions": [[*span] for span in sample.versions]} if len(sample.versions) > 1 else {}),
        }
        if tokenizer is not None:
            line["token_characters"] = token_characters(tokenizer, sample)
            line["token_log_ratios"] = stats and _by_token(sample, stats.log_ratios)
            line["token_advantages"] = _by_token(sample, sample.token_advantages)
        yield line


def _turn(turn: Turn) -> list[str | int | float]:
    """The line's entry for a turn; its reward stands only where there is one."""
    return [turn.role, turn.text, turn.num_tokens, *([] if turn.reward is None else [turn.reward])]


def _words(query: Query) -> list[int] | None:
    """Return where the user's last words begin and end in the prompt; None where they are all of it."""
    messages = [{"role": "user", "content": query.prompt}] if isinstance(query.prompt, str) else query.prompt
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    words = said[-1].strip() if said and isinstance(said[-1], str) else ""
    start = query.text.rfind(words)
    return None if start < 0 or words in ("", query.text.strip()) else [start, start + len(words)]


def _by_token(sample: Sample, numbers: Float[Tensor, "W"] | None) -> list[float | None] | None:
    """The numbers of a sample's tokens; null for one that is not finite, or whose token the policy did not write."""
    if numbers is None:
        return None
    written = iter(numbers.tolist())
    values = [next(written) if is_written else nan for is_written in sample.loss_mask.tolist()]
    return [float(f"{value:.{_DIGITS}g}") if isfinite(value) else None for value in values]
