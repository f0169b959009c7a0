"""What an evaluation comes to: means over questions, and how far chance may have moved them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
    return Estimate(
        mean=_mean(means) if means else math.nan,
        error_over_questions=over_questions,
        error_over_samples=over_samples,
        num_questions=size,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """With n - 1. Infinite, or NaN, of numbers whose sums are: `statistics` and `**` raise there."""
    mean = _mean(values)
    return sum((value - mean) * (value - mean) for value in values) / (len(values) - 1)
