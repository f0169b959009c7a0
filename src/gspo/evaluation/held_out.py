"""Score the policy on queries it is not trained on."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from gspo.evaluation.estimate import Estimate, estimate
from gspo.evaluation.verdict import passes, verdict
from gspo.recipe.schema import Recipe
from gspo.reward.functions import RewardFunction
from gspo.reward.score import score
from gspo.rollout.engine import Engine
from gspo.rollout.random_numbers import SamplingKey
from gspo.types import Failure, Query, Score

_SEED = 250718071  # not the recipe's: an evaluation draws the same numbers before and after training


@dataclass(frozen=True, kw_only=True)
class HeldOutScore:
    """What the policy's responses to the held-out queries come to."""

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

    def over_questions(value_of: Callable[[Score], float | None]) -> Estimate:
        """Over the responses for which there is a value."""
        scores = [[sample.score for sample in group.samples if sample.score is not None] for group in batch.groups]
        return estimate([[value for s in own if (value := value_of(s)) is not None] for own in scores])

    judged = [(sample, sample.score, verdict(sample.score)) for sample in batch.samples if sample.score is not None]
    judges = Counter(judge.function for _, _, judge in judged if judge)
    failed = {sample: v.value for sample, _, v in judged if v and isinstance(v.value, Failure)}
    masked = {sample: own.failure for sample, own, _ in judged if own.failure is not None}
    causes = [(sample.query.id, failed.get(sample) or masked.get(sample)) for sample in batch.samples]
    names = [function.name for function in functions]
    return HeldOutScore(
        pass_at_1=over_questions(lambda score: passes(verdict(score), settings.pass_threshold)),
        reward=over_questions(lambda score: score.reward),
        function_means={name: over_questions(partial(_part, name)).mean for name in names},
        num_responses=len(batch.samples),
        num_judged_by={name: judges[name] for name in names if judges[name]},
        num_unjudged=sum(judge is None for _, _, judge in judged),
        num_failed=len(failed),
        num_masked=len(masked),
        first_failure=next((f"{failure.message} (row {row})" for row, failure in causes if failure), ""),
        mean_response_tokens=fmean(sample.num_tokens for sample in batch.samples),
        truncated_fraction=fmean(sample.finish_reason == "length" for sample in batch.samples),
    )


def _part(name: str, score: Score) -> float | None:
    return score.parts[name]
