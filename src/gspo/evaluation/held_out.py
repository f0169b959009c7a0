"""Score the policy on queries it is not trained on: means over questions, and how far chance may have moved them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gspo.recipe.schema import Recipe
from gspo.recipe.sections import RolloutConfig
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import JUNK
from gspo.reward.reply import TrainerState
from gspo.reward.score import score
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Batch, Query, Sample, Score, ShowProgress

# Not the recipe's seed: an evaluation draws the same numbers before and after training.
SAMPLING_KEY = SamplingKey(seed=250718071, step=0)
_MAX_COLUMN = 1000  # characters; a longer column is no answer to be read beside a response
Numbers = Mapping[str, Any]  # what `numbers_of` returns
HELD_OUT = "held_out"  # the set of rows that a recipe's own data gives


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
class EvaluationSet:
    """Questions that the policy is not trained on, how responses to them are sampled, and what judges these.

    Example: EvaluationSet(name="aime24", queries=queries, functions=functions, sampling=RolloutConfig(group_size=32))
    """

    name: str
    queries: Sequence[Query]
    functions: Sequence[RewardFunction]
    sampling: RolloutConfig  # `group_size` responses to each query
    pass_threshold: float = 1.0
    probed: Sequence[tuple[str, Score]] = ()  # what the functions score the first row's answer and junk


def held_out_set(
    recipe: Recipe, queries: Sequence[Query], functions: Sequence[RewardFunction], name: str = HELD_OUT
) -> EvaluationSet:
    """The queries as the recipe's `evaluation` section samples them, judged by the recipe's functions."""
    settings = recipe.evaluation
    changed = {"temperature": settings.temperature, "group_size": settings.samples}
    sampling = recipe.rollout.model_copy(update=changed)
    return EvaluationSet(
        name=name, queries=queries, functions=functions, sampling=sampling, pass_threshold=settings.pass_threshold
    )


def verdict(score: Score) -> tuple[str | None, float]:
    """The first function, in the recipe's order, that applies to the response, and its number; None: none does.

    One that failed is taken to apply, and its number is NaN, which reaches no threshold: what comes after it may be
    about something else, such as the response's form.
    """
    for function, part in score.parts.items():
        if part is not None or function in score.failures:
            return function, math.nan if part is None else part
    return None, math.nan


def evaluate(
    sampler: Sampler,
    eval_set: EvaluationSet,
    state: TrainerState | None = None,
    show_progress: ShowProgress = lambda *_: None,
) -> tuple[Numbers, Batch]:
    """Sample and score with the weights last published; functions that fail are counted, and end no run."""
    groups = sampler.sample(eval_set.queries, eval_set.sampling, SAMPLING_KEY, show_progress=show_progress)
    batch = score(groups, eval_set.functions, state, max_masked_fraction=1.0, show_progress=show_progress)
    lines = [line for group in batch.groups for line in judged_lines(group.samples, eval_set.pass_threshold)]
    return numbers_of(lines, [function.name for function in eval_set.functions]), batch


def judged_lines(samples: Sequence[Sample], pass_threshold: float) -> Iterator[dict[str, Any]]:
    """Yield what is to be known of each scored response to a query, as evaluation.json has it."""
    for place, sample in enumerate(samples):
        sample_score = sample.score
        assert sample_score is not None
        judge, number = verdict(sample_score)
        failure = sample_score.failures.get(judge or "") or sample_score.failure
        yield {
            "query": sample.query.id,
            "sample": place,
            "prompt": sample.query.text,
            "columns": shown_columns(sample.query),
            "completion": sample.text,
            "passed": None if judge is None else number >= pass_threshold,
            "judge": judge,
            "reward": sample_score.reward,
            "rewards": dict(sample_score.parts),
            "extra": dict(sample_score.extra),
            "failure": failure and failure.message,
            "is_masked": sample_score.failure is not None,
            "tokens": sample.num_tokens,
            "finish_reason": sample.finish_reason,
        }


def shown_columns(query: Query) -> dict[str, Any]:
    """The columns of the data, such as the answer, that are text that is not long, a number or nothing."""
    return {
        name: value
        for name, value in query.columns.items()
        if isinstance(value, int | float | None) or (isinstance(value, str) and len(value) <= _MAX_COLUMN)
    }


def numbers_of(lines: Sequence[Mapping[str, Any]], functions: Sequence[str] = ()) -> dict[str, Any]:
    """The numbers of judged lines, at least one, under their names in evaluation.json.

    NaN stands for what does not exist. The lines' order is of no matter but for the first failure. `functions`
    are those that get a mean of their own.
    """
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:  # rows with the same prompt are one question, whatever tells them apart
        by_prompt.setdefault(line["prompt"] or line["query"], []).append(line)
    questions = [*by_prompt.values()]

    def over_questions(key: str, table: str | None = None) -> Estimate:
        """The mean over questions of a value of the responses, or one in a table of theirs, where there is one."""
        rows = [[(line[table] if table else line)[key] for line in own] for own in questions]
        return estimate([[number for number in row if number is not None] for row in rows])

    passed, reward = over_questions("passed"), over_questions("reward")
    at_k = pass_at_k([[line["passed"] for line in own] for own in questions])
    judges = Counter(line["judge"] for line in lines)
    causes = (f"{line['failure']} (row {line['query']})" for line in lines if line["failure"])
    return {
        "pass_at_1": passed.mean,
        "error_over_questions": passed.error_over_questions,
        "error_over_samples": passed.error_over_samples,
        "reward_mean": reward.mean,
        "reward_error": reward.error_over_questions,
        "mean_response_tokens": fmean(line["tokens"] for line in lines),
        "truncated_fraction": fmean(line["finish_reason"] == "length" for line in lines),
        "pass_at_k": {"1": passed.mean, **{str(k): rate for k, rate in at_k.items()}},
        "num_questions": passed.num_questions,
        "num_responses": len(lines),
        "num_unjudged": judges[None],  # no function applies: left out of pass@1
        "num_failed": sum(bool(line["judge"]) and line["rewards"][line["judge"]] is None for line in lines),
        "first_failure": next(causes, None),
        # Of an evaluation within a run alone:
        "num_masked": sum(line["is_masked"] for line in lines),  # no reward: a function that counts has failed
        "num_judged_by": {name: judges[name] for name in functions if judges[name]},
        "function_means": {name: over_questions(name, "rewards").mean for name in functions},  # unweighted
    }


def pass_at_k(passed: Sequence[Sequence[bool | None]]) -> dict[int, float]:
    """The mean over questions of 1 − C(n−c, k)/C(n, k), for k = 2, 4, 8, … and the most that every question has.

    c of a question's n judged responses pass; None is not judged, and a question without any is left out. The form
    1 − Π_{i=n−c+1}^{n} (1 − k/i) is exact and needs no large numbers (arXiv 2107.03374, Eq. 1).
    """
    judged = [[has_passed for has_passed in row if has_passed is not None] for row in passed]
    counts = [(len(row), sum(row)) for row in judged if row]
    most, rates = min((n for n, _ in counts), default=0), {}
    for k in sorted({most, *(2**power for power in range(1, most.bit_length()))} - {0, 1}):
        misses = [0.0 if n - c < k else math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)) for n, c in counts]
        rates[k] = fmean(1.0 - miss for miss in misses)
    return rates


def estimate(values: Sequence[Sequence[float | bool]]) -> Estimate:
    """(1/Q) Σ_q of the mean of each question's n_q values; a question without any is left out.

    Over questions: the standard deviation (Q − 1) of the questions' means / √Q. It does not exist where those are all
    equal, as they are of a single question: a deviation of 0 would be read as certainty. Over samples:
    (1/Q) √Σ_q s_q²/n_q, which is (1/Q) √Σ_q p̂_q (1 − p̂_q)/(n_q − 1) of values 0 and 1; every n_q must be 2 or more.
    """
    judged = [row for row in values if row]
    means, size = [sum(row) / len(row) for row in judged], len(judged)
    over_questions = over_samples = math.nan
    if len(set(means)) > 1:
        over_questions = math.sqrt(_variance(means) / size)
    if judged and min(map(len, judged)) > 1:
        over_samples = math.sqrt(sum(_variance(row) / len(row) for row in judged)) / size
    mean = sum(means) / size if means else math.nan
    return Estimate(mean=mean, error_over_questions=over_questions, error_over_samples=over_samples, num_questions=size)


def _variance(values: Sequence[float | bool]) -> float:
    """The variance, with n - 1. Of numbers with infinite sums it is so, or NaN: `statistics` and `**` raise there."""
    mean = sum(values) / len(values)
    return sum((value - mean) * (value - mean) for value in values) / (len(values) - 1)


def evaluation_notes(recipe: Recipe, num_held_out: int, probed: Sequence[tuple[str, Score]]) -> list[str]:
    """Return sentences about an evaluation on few queries, and about a threshold that cannot tell right from wrong.

    `probed` are the scores of a row's own answer, where it has one, and of junk. An answer that gets no more than
    junk is not known in its bare form. Without an answer, junk may be as right as anything.
    """
    wanted, threshold = recipe.evaluation.num_queries, recipe.evaluation.pass_threshold
    parts = [*recipe.queries.sources.values()] or [recipe.queries]
    is_a_tenth = recipe.evaluation.path is None and any(own.procedural is None for own in parts)
    (gold_by, gold), (junk_by, junk) = (verdict(score) for _, score in probed)
    has_answer, is_unknown = probed[0][0] != JUNK, gold <= junk
    notes, rows = list[str](), f"{num_held_out} {'row is' if num_held_out == 1 else 'rows are'}"
    if is_a_tenth and num_held_out < wanted:
        what = f"{rows} held out for evaluation, not the {wanted} of evaluation.num_queries"
        fix = f"give evaluation.path or more data; else set evaluation.num_queries={num_held_out}"
        notes.append(f"{what}: at most a tenth of the data is. For more, {fix}")
    fix = "set evaluation.pass_threshold to what a right answer gets"
    if has_answer and (0 < junk < threshold if is_unknown else gold < threshold):
        both = f"{gold:g}{f' and junk {junk:g}' if is_unknown else ''}, and evaluation.pass_threshold is {threshold:g}"
        notes.append(f"{gold_by} gives the row's own answer {both}: if no response gets more, pass@1 stays 0; {fix}")
    if junk > threshold or (has_answer and junk == threshold):
        both = f"{junk:g}, and evaluation.pass_threshold is {threshold:g}"
        notes.append(f"{junk_by} gives junk {both}: such a response passes; {fix}")
    return notes if num_held_out else []
