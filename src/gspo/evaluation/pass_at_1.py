"""pass@1: the probability that one sampled response passes its verifier."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PassRate:
    """pass@1 over Q queries with n samples each."""

    pass_at_1: float
    standard_error: float  # over the questions drawn and the responses sampled
    num_queries: int
    mean_response_tokens: float
    truncated_fraction: float


def pass_at_1(passed: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """(1/Q) Σ_q c_q/n and its standard error over questions, from Q queries' n outcomes each."""
    rates = [sum(outcomes) / len(outcomes) for outcomes in passed]
    mean = sum(rates) / len(rates)
    variance = sum((rate - mean) ** 2 for rate in rates) / max(1, len(rates) - 1)
    return mean, math.sqrt(variance / len(rates))
