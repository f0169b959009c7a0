"""Score the policy on queries it is not trained on."""

from collections.abc import Sequence
from dataclasses import replace

from gspo.config import Recipe
from gspo.evaluation.pass_at_1 import PassRate, pass_at_1
from gspo.policy.model import Policy
from gspo.records import Query
from gspo.reward.functions import RewardFunction
from gspo.reward.score import score
from gspo.rollout.source import sample_groups

_SEED = 250718071  # not the recipe's: an evaluation draws the same numbers before and after training


def evaluate(policy: Policy, queries: Sequence[Query], functions: Sequence[RewardFunction], recipe: Recipe) -> PassRate:
    """pass@1 of the policy; a response passes if the first reward function gives at least the threshold.

    A response that function does not apply to counts as not passed. One that it failed on, or a query without any
    other, is left out.
    """
    sampling = recipe.rollout.model_copy(update={"temperature": recipe.evaluation.temperature})
    groups = sample_groups(
        policy, queries, sampling, group_size=recipe.evaluation.samples, seed=_SEED, policy_version=0
    )
    verifier = replace(functions[0], weight=1.0)  # weight 0, measured only, would make its failures pass unnoticed
    scores = iter(score(groups, [verifier]).scores)
    by_query = [[one for one in (next(scores) for _ in group.rollouts) if one.failure is None] for group in groups]
    threshold = recipe.evaluation.pass_threshold
    passed = [[one.reward is not None and one.reward >= threshold for one in some] for some in by_query if some]
    rate, error = pass_at_1(passed)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return PassRate(
        pass_at_1=rate,
        standard_error=error,
        num_queries=len(passed),
        mean_response_tokens=sum(len(rollout.response_ids) for rollout in rollouts) / len(rollouts),
        truncated_fraction=sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
    )
