"""Score the policy on queries it is not trained on."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from gspo.evaluation.estimate import Estimate, estimate
from gspo.evaluation.verdict import passes, verdict
from gspo.model.policy import Policy
from gspo.recipe.schema import Recipe
from gspo.reward.functions import RewardFunction
from gspo.reward.score import score
from gspo.rollout.source import sample_groups
from gspo.types import Failure, Query

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
    policy: Policy,
    queries: Sequence[Query],
    functions: Sequence[RewardFunction],
    recipe: Recipe,
    *,
    check_stop: Callable[[], None] = lambda: None,
) -> HeldOutScore:
    """pass@1 and mean reward of the policy; functions that fail are counted, and never end the run."""
    num_samples = recipe.evaluation.samples
    sampling = recipe.rollout.model_copy(update={"temperature": recipe.evaluation.temperature})
    groups = sample_groups(
        policy, queries, sampling, group_size=num_samples, seed=_SEED, policy_version=0, check_stop=check_stop
    )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = score(groups, functions, max_masked_fraction=1.0, check_stop=check_stop).scores
    verdicts = [verdict(one) for one in scores]
    rows = [group.query.id for group in groups for _ in group.rollouts]
    failed = [one.value if one and isinstance(one.value, Failure) else None for one in verdicts]
    masked = [one.failure for one in scores]
    causes = [one or two for one, two in zip(failed, masked, strict=True)]
    judges = Counter(one.function for one in verdicts if one)
    over_questions = partial(_estimate, num_samples=num_samples)
    return HeldOutScore(
        pass_at_1=over_questions([passes(one, recipe.evaluation.pass_threshold) for one in verdicts]),
        reward=over_questions([one.reward for one in scores]),
        function_means={f.name: over_questions([one.parts[f.name] for one in scores]).mean for f in functions},
        num_responses=len(rollouts),
        num_judged_by={f.name: judges[f.name] for f in functions if judges[f.name]},
        num_unjudged=sum(one is None for one in verdicts),
        num_failed=sum(one is not None for one in failed),
        num_masked=sum(one is not None for one in masked),
        first_failure=next((f"{one.message} (row {row})" for one, row in zip(causes, rows, strict=True) if one), ""),
        mean_response_tokens=fmean(len(rollout.response_ids) for rollout in rollouts),
        truncated_fraction=fmean(rollout.finish_reason == "length" for rollout in rollouts),
    )


def _estimate(values: Sequence[float | None], *, num_samples: int) -> Estimate:
    """Of as many values a question, one after another; None takes no part."""
    starts = range(0, len(values), num_samples)
    return estimate([[one for one in values[at : at + num_samples] if one is not None] for at in starts])
