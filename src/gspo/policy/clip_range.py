"""A clip range that sets itself: wide enough that a given fraction of the tokens is clipped."""

import math
from collections.abc import Sequence

from gspo.config import Actor
from gspo.policy.item import Trained
from gspo.records import Batch

_MEMORY = 0.5  # of the scale so far, in the running mean of its logarithm
_BOUNDS = (1e-3, 1e3)  # of one step's change: a step of a single clipped sequence says little


def with_clip_range(actor: Actor, scale: float | None) -> Actor:
    """The actor with its clip range scaled, where `clip_fraction` asks for that; the sides keep their proportion."""
    if actor.clip_fraction is None or scale is None:
        return actor
    low, high = min(1.0, actor.clip_low * scale), actor.clip_high * scale
    return actor.model_copy(update={"clip_low": low, "clip_high": high})


def next_scale(scale: float | None, actor: Actor, batch: Batch, trained: Sequence[Trained]) -> float | None:
    """The running scale after a step, whose own would have clipped `clip_fraction` of its tokens; None: none known yet.

    A sequence is clipped if its excess, (s - 1)/clip_high where Â > 0 and (1 - s)/clip_low where Â < 0, is above the
    scale. So the scale is the quantile of the excess, weighed by tokens, over all mini-batches of the step.
    """
    if actor.clip_fraction is None or not trained:
        return scale
    found = sorted(((_excess(item, actor, batch), item.num_tokens) for item in trained), reverse=True)
    budget = actor.clip_fraction * sum(tokens for _, tokens in found)
    wanted = 0.0
    for excess, tokens in found:
        wanted = excess
        budget -= tokens
        if budget < 0:
            break
    if not wanted > 0:  # fewer than that have moved at all (or NaN): keep what there is
        return scale
    low, high = (bound * (scale or 1.0) for bound in _BOUNDS)
    wanted = min(max(wanted, low), high)
    return wanted if scale is None else float(scale**_MEMORY * wanted ** (1 - _MEMORY))


def _excess(item: Trained, actor: Actor, batch: Batch) -> float:
    advantage, moved = batch.advantages[item.index], item.sequence_ratio - 1
    if advantage == 0:  # trained by a KL or entropy term: never clipped
        return -math.inf
    return moved / actor.clip_high if advantage > 0 else -moved / actor.clip_low
