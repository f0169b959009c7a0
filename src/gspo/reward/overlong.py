"""What a response that runs into the limit of its length loses of its reward."""

from dataclasses import replace

from gspo.recipe.sections import RolloutConfig
from gspo.types import Batch, Score

PART = "overlong_penalty"  # its name among a score's parts


def with_overlong_penalty(batch: Batch, sampling: RolloutConfig) -> Batch:
    """Take the penalty off each reward there is, where rollout.overlong asks for it."""
    if sampling.overlong != "penalty":
        return batch
    changed, limit = {}, sampling.max_new_tokens
    for sample in batch.samples:
        if (score := sample.score) is not None:
            penalty = None
            if score.reward is not None:
                penalty = overlong_penalty(sample.num_limited, limit, sampling.overlong_margin)
                score = replace(_with_added(score, penalty), penalty=penalty)
            changed[sample] = replace(sample, score=replace(score, parts={**score.parts, PART: penalty}))
    return batch.with_changed(changed)


def overlong_penalty(num_tokens: int, max_tokens: int, margin: float) -> float:
    """Return 0 up to (1 - margin) · max_tokens, then a line down to -1 (DAPO, arXiv 2503.14476, Eq. 13)."""
    start = (1 - margin) * max_tokens
    if num_tokens <= start:
        return 0.0
    return max(-1.0, -(num_tokens - start) / (max_tokens - start))  # one of an earlier phase may be longer


def without_penalty(score: Score) -> Score:
    """Return the score that the reward functions gave."""
    return replace(_with_added(score, -score.penalty), penalty=0.0) if score.penalty else score


def _with_added(score: Score, amount: float) -> Score:
    """Add the amount to the reward, and to what the last token earns."""
    assert score.reward is not None
    by_token = None if score.token_rewards is None else score.token_rewards.clone()
    if by_token is not None:
        by_token[-1] += amount
    return replace(score, reward=score.reward + amount, token_rewards=by_token)
