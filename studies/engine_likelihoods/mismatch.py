"""A hook: how far engine and trainer are apart, token by token, also where the engine's likelihoods are π_old."""

from collections.abc import Mapping, Sequence
from typing import Any


def by_token(step: int, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Log the mean and the largest |log π_trainer − log π_engine| over trained tokens, before any update on them.

    With recomputed likelihoods gspo's own metrics have it. With the engine's, the ratios of the first mini-batch are of
    the policy that has sampled it: they show the mismatch and nothing else.
    """
    gaps = first_gaps(samples)
    if gaps and any(gaps):
        return {"log": {"token_gap_mean": sum(gaps) / len(gaps), "token_gap_max": max(gaps)}}
    names = {"token_gap_mean": "mismatch/logprob_gap_mean", "token_gap_max": "mismatch/logprob_gap_max"}
    return {"log": {own: metrics[theirs] for own, theirs in names.items()}}


def first_gaps(samples: Sequence[Mapping[str, Any]]) -> list[float]:
    """|log π_θ/π_old| of the tokens of the first mini-batch."""
    rows = (sample["token_log_ratios"] for sample in samples if sample["mini_batch"] == 0)
    return [abs(ratio) for row in rows for ratio in row or () if ratio is not None]
