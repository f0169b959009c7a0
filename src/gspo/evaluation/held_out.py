"""Score the policy on queries it is not trained on."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from gspo.evaluation.estimate import Estimate, HeldOutScore, estimate
from gspo.recipe.schema import Recipe
from gspo.reward.functions import RewardFunction
from gspo.reward.score import score
from gspo.rollout.engine import Engine, SamplingKey
from gspo.types import Failure, Query, Sample, Score

_SEED = 250718071  # not the recipe's: an evaluation draws the same numbers before and after training


class Verdict(NamedTuple):
    """What the judging function says of a response: its number, or why there is none."""

    function: str
    value: float | Failure


def verdict(score: Score) -> Verdict | None:
    """That of the first function, in the recipe's order, that applies to the response; None where none does.

    One that failed is taken to apply: what comes after it may be about something else, such as the response's form.
    """
    values = ((function, score.failures.get(function, part)) for function, part in score.parts.items())
    return next((Verdict(function, value) for function, value in values if value is not None), None)


def passes(judged: Verdict | None, threshold: float) -> bool | None:
    """Whether a response passes; None where no function judges it."""
    return judged and not isinstance(judged.value, Failure) and judged.value >= threshold


def evaluate(
    engine: Engine,
    queries: Sequence[Query],
    functions: Sequence[RewardFunction],
    recipe: Recipe,
    check_stop: Callable[[], None] = lambda: None,
) -> HeldOutScore:
    """pass@1 and mean reward of the weights last published; functions that fail are counted, and never end the run.

    `check_stop` is called while responses are sampled and scored; it may raise.
    """
    settings = recipe.evaluation
    changed = {"temperature": settings.temperature, "group_size": settings.samples}
    sampling = recipe.rollout.model_copy(update=changed)
    groups = engine.sample(queries, sampling, SamplingKey(seed=_SEED, step=0), check_stop=check_stop)
    batch = score(groups, functions, max_masked_fraction=1.0, check_stop=check_stop)
    scores = {sample: sample.score for sample in batch.samples if sample.score is not None}
    verdicts = {sample: verdict(own) for sample, own in scores.items()}
    failed = {sample: v.value for sample, v in verdicts.items() if v and isinstance(v.value, Failure)}
    masked = {sample: own.failure for sample, own in scores.items() if own.failure is not None}
    causes = [(sample.query.id, failed.get(sample) or masked.get(sample)) for sample in batch.samples]
    judges = Counter(own.function for own in verdicts.values() if own)
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
        num_unjudged=len(verdicts) - judges.total(),
        num_failed=len(failed),
        num_masked=len(masked),
        first_failure=next((f"{failure.message} (row {row})" for row, failure in causes if failure), ""),
        mean_response_tokens=fmean(sample.num_tokens for sample in batch.samples),
        truncated_fraction=fmean(sample.finish_reason == "length" for sample in batch.samples),
    )
