"""What an evaluation comes to: its numbers, under the names that docs/metrics.md defines, and a line in words."""

from gspo.errors import visible
from gspo.evaluation.held_out import HeldOutScore
from gspo.metrics.evaluated import measured, measures
from gspo.metrics.numbers import Metrics


def evaluation_metrics(score: HeldOutScore, set_name: str) -> Metrics:
    """The same names for every evaluation of a run."""
    metrics: Metrics = {
        "pass_at_1": score.pass_at_1.mean,
        "standard_error": score.pass_at_1.error_over_questions,
        "standard_error_samples": score.pass_at_1.error_over_samples,
        "reward_mean": score.reward.mean,
        "reward_standard_error": score.reward.error_over_questions,
        "unjudged_fraction": score.num_unjudged / score.num_responses,
        "failed_fraction": score.num_failed / score.num_responses,
        "mean_tokens": score.mean_response_tokens,
        "truncated_fraction": score.truncated_fraction,
    }
    if len(score.function_means) > 1:
        metrics |= {f"{function}/mean": mean for function, mean in score.function_means.items()}
    return {f"evaluation/{set_name}/{name}": value for name, value in metrics.items()}


def evaluation_summary(score: HeldOutScore, metrics: Metrics) -> str:
    """Such as `0.514 ± 0.022 on 512 held-out queries`, the reward where it is another number, the judges of several."""
    pass_at_1, *rewards = measures([metrics])
    size = score.pass_at_1.num_questions
    words = f"{measured(metrics, pass_at_1)} on {size} held-out {'query' if size == 1 else 'queries'}"
    words += "".join(f", reward {measured(metrics, reward)}" for reward in rewards)
    if len(score.num_judged_by) > 1:  # some of them may not be verifiers at all
        words += f"; judged by {', '.join(f'{name}: {number}' for name, number in score.num_judged_by.items())}"
    if score.num_unjudged:
        words += f"; no reward function applies to {score.num_unjudged} of {score.num_responses} responses: left out"
    return words


def failure_summary(score: HeldOutScore) -> str:
    """What reward functions that failed have done to the scores, and how the first failed; empty where none has."""
    if not score.first_failure:
        return ""
    return (
        f"reward functions failed on some of {score.num_responses} held-out responses: {score.num_failed} count as not "
        f"passed, {score.num_masked} have no reward; the first: {visible(score.first_failure)}"
    )
