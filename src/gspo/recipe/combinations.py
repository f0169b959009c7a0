"""Settings that mean nothing together: refused before anything is loaded, each with its reason."""

from collections.abc import Iterator
from typing import Any

from gspo.recipe.published import CORRECTIONS, PUBLISHED

Recipe = Any  # gspo.recipe.schema asks here whether a recipe can be


def impossible(recipe: Recipe) -> Iterator[str]:
    """A sentence for each combination: where, why, and what to set instead."""
    yield from _groups(recipe)
    yield from _rewards(recipe)
    yield from _level(recipe)
    yield from _advantage(recipe)
    yield from _correction(recipe)
    yield from _clip_fraction(recipe)
    yield from _kl(recipe)


def _groups(recipe: Recipe) -> Iterator[str]:
    queries, parts = recipe.rollout.queries_per_step, recipe.actor.mini_batches
    if queries % parts:
        yield (
            f"actor.mini_batches ({parts}) must divide rollout.queries_per_step ({queries}): "
            "groups stay whole within a mini-batch"
        )
    if recipe.rollout.group_size < 2 and recipe.actor.advantage != "gae":
        yield (
            "rollout.group_size must be at least 2: a lone response has no others to be compared with, so its "
            "advantage is 0 (but for a value model's: actor.surrogate: ppo)"
        )


def _rewards(recipe: Recipe) -> Iterator[str]:
    if recipe.reward and not any(reward.weight for reward in recipe.reward):
        yield "reward: every function has weight 0, which measures only: there is nothing to train on"
    finer = [f"reward.{number}.per: {one.per}" for number, one in enumerate(recipe.reward) if one.per == "segment"]
    if finer and recipe.rollout.segment_separator is None:
        yield (
            f"{finer[0]} needs rollout.segment_separator, or nothing says where a segment ends: give "
            r'the text that ends one (where each line is a segment: segment_separator: "\n")'
        )


def _level(recipe: Recipe) -> Iterator[str]:
    name, level = recipe.actor.surrogate, recipe.actor.importance_sampling_level
    published = PUBLISHED[name]
    if level not in published.levels:
        fitting = " or ".join(published.levels)
        fix = f"set importance_sampling_level: {fitting}"
        yield f"actor.surrogate: {name} has no level {level}: {published.only}; {fix}"


def _advantage(recipe: Recipe) -> Iterator[str]:
    actor = recipe.actor
    finer = [
        f"reward.{number}.per: {one.per}"
        for number, one in enumerate(recipe.reward)
        if one.weight and one.per != "response"
    ]
    by_token = finer + ["actor.advantage: gae"] * (actor.advantage == "gae")
    if actor.importance_sampling_level not in PUBLISHED[actor.surrogate].levels:
        return  # said already
    if by_token and actor.importance_sampling_level == "sequence":
        yield (
            f"{by_token[0]} gives every token an advantage of its own, and the ratio of a sequence takes one a "
            "sequence; set actor.importance_sampling_level: sequence_token (GSPO-token) or token"
        )
    if by_token and actor.surrogate == "gmpo":
        yield f"{by_token[0]} gives every token an advantage of its own; gmpo weighs whole sequences; use sapo or clip"
    if finer and actor.advantage == "gae":
        yield (
            f"{finer[0]} with actor.advantage: gae: the value model learns one reward at the end of a "
            "response; set actor.advantage: group"
        )
    if recipe.rollout.dynamic_sampling and actor.advantage == "gae":
        yield (
            "rollout.dynamic_sampling with actor.advantage: gae: a group of equal rewards has advantages there, "
            "and dropping it would hide from the value model what it is to learn; set dynamic_sampling: false"
        )


def _correction(recipe: Recipe) -> Iterator[str]:
    actor = recipe.actor
    if actor.correction == "none":
        return
    where = f"actor.correction: {actor.correction}"
    if actor.old_logprobs == "engine":
        yield (
            f"{where} weighs by π_old/π_engine, which is 1 with actor.old_logprobs: engine; set old_logprobs: recompute"
        )
    if actor.surrogate in ("minirl", "dppo") and actor.correction != "geometric_mask":
        own = ", at most actor.minirl_cap," if actor.surrogate == "minirl" else ""
        yield (
            f"{where} with {actor.surrogate}, which weighs tokens by π_θ/π_engine itself{own} and would do so twice; "
            "set correction: geometric_mask, which only drops, or none"
        )
    levels, level = CORRECTIONS[actor.correction].levels, actor.correction_level
    if level not in levels:
        yield f"{where} is by {levels[0]}, and has no correction_level: {level}; leave it out, or take mis"
    one_ratio = actor.importance_sampling_level == "sequence" or actor.surrogate == "gmpo"
    if actor.correction in ("mis", "icepop") and level == "token" and one_ratio:
        yield (
            f"{where} drops single tokens, and there is one ratio for the whole sequence; "
            "set correction_level: sequence (mis), correction: geometric_mask, or another level of the ratio"
        )
    low, high = actor.correction_low, actor.correction_high
    if low is not None and high is not None and low >= high:
        yield f"actor.correction_low {low:g} must be below correction_high {high:g}"


def _clip_fraction(recipe: Recipe) -> Iterator[str]:
    actor = recipe.actor
    if actor.clip_fraction is None:
        return
    if not PUBLISHED[actor.surrogate].bounds_ratio:
        yield f"actor.clip_fraction: {actor.surrogate} has no clip range on the ratio that could be set; leave it out"
    elif actor.importance_sampling_level == "token":
        yield (
            "actor.clip_fraction follows the ratio of the sequence, and at level token each token has its own; "
            "set importance_sampling_level: sequence or sequence_token"
        )
    elif actor.advantage == "gae" or any(one.per != "response" and one.weight for one in recipe.reward):
        yield (
            "actor.clip_fraction takes a response to be pushed one way, and its tokens have advantages of their own "
            "here; set clip_low and clip_high, and leave it out"
        )
    elif actor.mini_batches == 1:
        yield "actor.clip_fraction with actor.mini_batches 1: every ratio is 1, none can be clipped; raise mini_batches"


def _kl(recipe: Recipe) -> Iterator[str]:
    kl = recipe.actor.kl
    if kl.coefficient and kl.place == "reward" and recipe.actor.advantage == "group":
        yield (
            "actor.kl.place: reward with actor.advantage: group: in a group of equal rewards the deviation is that of "
            "the KL alone, which would be blown up to ±1 whatever its coefficient; "
            "set advantage: group_mean, leave_one_out, batch or gae, or kl.place: loss"
        )
    if kl.coefficient and kl.place == "loss" and kl.estimator == "k1":
        yield (
            "actor.kl.estimator: k1 in the loss: its expected gradient is 0, whatever the reference; "
            "use k2, whose gradient is the KL's, or k3, or actor.kl.place: reward"
        )
