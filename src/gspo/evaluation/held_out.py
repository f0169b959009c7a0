"""Score the policy on queries it is not trained on: means over questions, and how far chance may have moved them."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gspo.recipe.schema import Recipe
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import JUNK
from gspo.reward.log import TrainerState
from gspo.reward.score import score
from gspo.rollout.engine import Engine, SamplingKey
from gspo.types import Query, Sample, Score, ShowProgress

_SEED = 250718071  # not the recipe's: an evaluation draws the same numbers before and after training
Verdict = tuple[str, float]  # the name of the function that judges a response, and its number


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over Q questions; NaN stands for what does not exist.

    Example: Estimate(mean=0.5, error_over_questions=0.06, error_over_samples=math.nan, num_questions=64)
    """

    mean: float
    error_over_questions: float  # standard error, had other questions been drawn; of the samples' chance, too
    error_over_samples: float  # standard error, had these questions been sampled again
    num_questions: int


@dataclass(frozen=True, kw_only=True)
class HeldOutScore:
    """What the policy's responses to the held-out queries come to.

    Example: HeldOutScore(pass_at_1=estimate([[1.0], [0.0]]), function_means={"math": 0.5}, num_responses=2, …)
    """

    pass_at_1: Estimate  # over the responses that a function judges
    reward: Estimate  # over those that have one: weighted sum of the functions, without a penalty for length
    function_means: Mapping[str, float]  # unweighted, over what each applies to; NaN where that is nothing
    num_responses: int
    num_judged_by: Mapping[str, int]  # by function, of those that judge any
    num_unjudged: int  # no function applies: left out of pass@1
    num_failed: int  # the judging function failed: not passed
    num_masked: int  # a function of weight other than 0 failed: no reward
    first_failure: str  # of either: its message and row; empty where there is none
    mean_response_tokens: float
    truncated_fraction: float
    logged: Mapping[str, tuple[float, int]] = field(default_factory=dict)  # as in Batch
    samples: Sequence[Sample] = field(default=(), compare=False)  # the responses themselves, scored


def verdict(score: Score) -> Verdict:
    """The first function, in the recipe's order, that applies to the response, and its number; ("", NaN): none does.

    One that failed is taken to apply, and its number is NaN: what comes after it may be about something else, such as
    the response's form.
    """
    for function, part in score.parts.items():
        if part is not None or function in score.failures:
            return function, math.nan if part is None else part
    return "", math.nan


def passes(judged: Verdict, threshold: float) -> bool | None:
    """Whether a response passes; None where no function judges it."""
    function, value = judged
    return value >= threshold if function else None


def evaluate(
    engine: Engine,
    queries: Sequence[Query],
    functions: Sequence[RewardFunction],
    recipe: Recipe,
    state: TrainerState | None = None,
    check_stop: Callable[[], None] = lambda: None,
    show_progress: ShowProgress = lambda *_: None,
) -> HeldOutScore:
    """pass@1 and mean reward of the weights last published; functions that fail are counted, and never end the run.

    `check_stop` is called while responses are sampled and scored; it may raise.
    """
    settings = recipe.evaluation
    changed = {"temperature": settings.temperature, "group_size": settings.samples}
    sampling = recipe.rollout.model_copy(update=changed)
    key = SamplingKey(seed=_SEED, step=0)
    watched: dict[str, Any] = {"check_stop": check_stop, "show_progress": show_progress}
    groups = engine.sample(queries, sampling, key, **watched)
    batch = score(groups, functions, state, max_masked_fraction=1.0, **watched)
    scores = {sample: sample.score for sample in batch.samples if sample.score is not None}
    verdicts = {sample: verdict(own) for sample, own in scores.items()}
    failed = {sample: scores[sample].failures.get(function) for sample, (function, _) in verdicts.items()}
    causes = [(sample.query.id, failed[sample] or own.failure) for sample, own in scores.items()]
    judges = Counter(function for function, _ in verdicts.values())
    names = [function.name for function in functions]

    def over_questions(values: Mapping[Sample, float | None]) -> Estimate:
        """Over the responses for which there is a value."""
        rows = [[values.get(sample) for sample in group.samples] for group in batch.groups]
        return estimate([[value for value in row if value is not None] for row in rows])

    return HeldOutScore(
        pass_at_1=over_questions({sample: passes(own, settings.pass_threshold) for sample, own in verdicts.items()}),
        reward=over_questions({sample: own.reward for sample, own in scores.items()}),
        function_means={name: over_questions({s: own.parts[name] for s, own in scores.items()}).mean for name in names},
        num_responses=len(batch.samples),
        num_judged_by={name: judges[name] for name in names if judges[name]},
        num_unjudged=judges[""],
        num_failed=sum(failure is not None for failure in failed.values()),
        num_masked=sum(own.failure is not None for own in scores.values()),
        first_failure=next((f"{failure.message} (row {row})" for row, failure in causes if failure), ""),
        mean_response_tokens=fmean(sample.num_tokens for sample in batch.samples),
        truncated_fraction=fmean(sample.finish_reason == "length" for sample in batch.samples),
        logged=batch.logged,
        samples=batch.samples,
    )


def estimate(values: Sequence[Sequence[float]]) -> Estimate:
    """(1/Q) Σ_q of the mean of each question's n_q values; a question without any is left out.

    Over questions: the standard deviation (Q − 1) of the questions' means / √Q. It does not exist where those are all
    equal, as they are of a single question: a deviation of 0 would be read as certainty. Over samples:
    (1/Q) √Σ_q s_q²/n_q, which is (1/Q) √Σ_q p̂_q (1 − p̂_q)/(n_q − 1) of values 0 and 1; every n_q must be 2 or more.
    """
    judged = [own for own in values if own]
    means, size = [_mean(own) for own in judged], len(judged)
    over_questions = over_samples = math.nan
    if len(set(means)) > 1:
        over_questions = math.sqrt(_variance(means) / size)
    if judged and min(map(len, judged)) > 1:
        over_samples = math.sqrt(sum(_variance(own) / len(own) for own in judged)) / size
    mean = _mean(means) if means else math.nan
    return Estimate(mean=mean, error_over_questions=over_questions, error_over_samples=over_samples, num_questions=size)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """With n - 1. Infinite, or NaN, of numbers whose sums are: `statistics` and `**` raise there."""
    mean = _mean(values)
    return sum((value - mean) * (value - mean) for value in values) / (len(values) - 1)


def evaluation_notes(recipe: Recipe, num_held_out: int, probed: Sequence[tuple[str, Score]]) -> list[str]:
    """Sentences about an evaluation on few queries, and about a threshold that cannot tell right from wrong.

    `probed` are the scores of a row's own answer, where it has one, and of junk, by text. An answer that gets no more
    than junk is not known in its bare form, which says nothing of the threshold. Without an answer, junk may be as
    right as anything: only a number above the threshold is worth a word.
    """
    wanted, threshold = recipe.evaluation.num_queries, recipe.evaluation.pass_threshold
    is_a_tenth = recipe.evaluation.path is None and recipe.queries.procedural is None
    (gold_by, gold), (junk_by, junk) = (verdict(score) for _, score in probed)
    has_answer, is_unknown = probed[0][0] != JUNK, gold <= junk
    fix = "set evaluation.pass_threshold to what a right answer gets"
    table = {
        f"""{num_held_out} {"row is" if num_held_out == 1 else "rows are"} held out for evaluation, not the {wanted} of
        evaluation.num_queries: at most a tenth of the data is. For more, give evaluation.path or more data; else set
        evaluation.num_queries={num_held_out}
        """: is_a_tenth and num_held_out < wanted,
        f"""{gold_by} gives the row's own answer {gold:g}{f" and junk {junk:g}" if is_unknown else ""}, and
        evaluation.pass_threshold is {threshold:g}: if no response gets more, pass@1 stays 0; {fix}
        """: has_answer and (0 < junk < threshold if is_unknown else gold < threshold),
        f"""{junk_by} gives junk {junk:g}, and evaluation.pass_threshold is {threshold:g}: such a response passes; {fix}
        """: junk > threshold or (has_answer and junk == threshold),
    }
    return [" ".join(sentence.split()) for sentence, holds in table.items() if holds and num_held_out]
