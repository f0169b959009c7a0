"""A clip range that sets itself: wide enough that a given fraction of the tokens is clipped."""

import math
from collections.abc import Sequence

from gspo.recipe.sections import ActorConfig
from gspo.types import Sample

_LEVEL, _TREND = 0.5, 0.2  # the share of a step's own number in each: one step is a noisy sample
_BOUND = 7.0  # of one step's change, in the logarithm: a step of a single clipped sequence says little

Scale = tuple[float, float]  # the logarithm of what the recipe's range is multiplied by, and its trend a step


def with_clip_range(actor: ActorConfig, scale: Scale | None) -> ActorConfig:
    """The actor with its clip range scaled, where `clip_fraction` asks for that; the sides keep their proportion."""
    if actor.clip_fraction is None or scale is None:
        return actor
    factor = math.exp(sum(scale))
    low, high = min(1.0, actor.clip_low * factor), actor.clip_high * factor
    return actor.model_copy(update={"clip_low": low, "clip_high": high})


def next_scale(scale: Scale | None, actor: ActorConfig, samples: Sequence[Sample]) -> Scale | None:
    """The running scale after a step, for the step to come, from its samples; None: there is none yet.

    Ratios shrink as a policy gets surer, steadily over many steps: a mean of those that were would lag behind. So the
    logarithm of `clipping_scale` is smoothed together with its trend (Holt 1957).
    """
    if actor.clip_fraction is None or not (wanted := clipping_scale(actor, samples)) > 0:
        return scale
    level, trend = scale or (0.0, 0.0)
    current = min(max(math.log(wanted), level - _BOUND), level + _BOUND)
    if scale is None:
        return current, 0.0
    smoothed = _LEVEL * current + (1 - _LEVEL) * (level + trend)
    return smoothed, _TREND * (smoothed - level) + (1 - _TREND) * trend


def clipping_scale(actor: ActorConfig, samples: Sequence[Sample]) -> float:
    """Return what the range would have to be multiplied by for `clip_fraction` of the step's tokens to be clipped.

    A sequence is clipped if its excess, (s - 1)/clip_high where Â > 0 and (1 - s)/clip_low where Â < 0, is above the
    scale. So the scale is the quantile of the excess, weighed by tokens, over all mini-batches of the step. Not above
    0, or NaN, where fewer than that have moved at all. A sequence of Â = 0, trained by a KL or entropy term, is never
    clipped.
    """
    excesses = []
    for sample in samples:
        for stats in sample.all_stats:
            moved, advantage = stats.sequence_ratio - 1, sample.advantage
            excess = moved / actor.clip_high if advantage > 0 else -moved / actor.clip_low if advantage else -math.inf
            excesses.append((excess, stats.num_tokens))
    assert actor.clip_fraction is not None
    budget = actor.clip_fraction * sum(tokens for _, tokens in excesses)
    for excess, tokens in sorted(excesses, reverse=True):
        budget -= tokens
        if budget < 0:
            return excess
    return 0.0
