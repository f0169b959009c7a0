"""Settings that a recipe states but that cannot have an effect in it: nothing is ignored in silence."""

import math

from gspo.recipe.published import CORRECTIONS, PUBLISHED
from gspo.recipe.schema import Recipe, Section
from gspo.recipe.section import names_file


def inert_settings(recipe: Recipe) -> list[str]:
    """One sentence for each setting that does nothing, or not what its reader would think, in this recipe."""
    return [
        *_ratio(recipe),
        *_surrogate(recipe),
        *_additions(recipe),
        *_selection(recipe),
        *_sampling(recipe),
        *_optimizer(recipe),
        *_queries(recipe),
        *_sections(recipe),
        *_report(recipe),
    ]


def _ratio(recipe: Recipe) -> list[str]:
    actor, found = recipe.actor, []
    if actor.mini_batches == 1 and actor.routing_replay == "policy":
        found.append(
            "actor.routing_replay: policy has no effect with actor.mini_batches 1: the only update of a batch starts "
            "from π_old, whose experts are the policy's own"
        )
    if actor.old_logprobs == "engine" and actor.routing_replay == "policy":
        found.append(
            "actor.routing_replay: policy with actor.old_logprobs: engine: π_old's likelihood is under the engine's "
            "experts, π_θ's under the trainer's, which cost a pass (old_logprobs: recompute gets both from that pass)"
        )
    if actor.mini_batches == 1:
        found.append(
            "actor.mini_batches is 1: each rollout batch gets one update, so every importance ratio is 1 and "
            "nothing is ever clipped: surrogates that differ in the ratio only (GSPO, GSPO-token, GRPO) are the same"
        )
        if actor.opsm_delta is not None:
            found.append(
                "actor.opsm_delta with actor.mini_batches 1: the policy has not moved, so that only what the engine's "
                "likelihoods differ by can drop a sequence"
            )
    elif actor.surrogate == "reinforce":
        found.append(
            f"actor.surrogate: reinforce has no ratio: of {actor.mini_batches} mini-batches all but the first are "
            "stale, and nothing makes up for it (mini_batches: 1 is on-policy)"
        )
    one_advantage = actor.advantage != "gae" and all(reward.per == "response" for reward in recipe.reward)
    if actor.importance_sampling_level == "sequence_token" and one_advantage:
        found.append(
            "actor.importance_sampling_level: sequence_token equals sequence here, "
            "for every token of a response has the same advantage"
        )
    return found + _clip_range(recipe)


def _clip_range(recipe: Recipe) -> list[str]:
    actor, published = recipe.actor, PUBLISHED[recipe.actor.surrogate]
    level, low, high = actor.importance_sampling_level, actor.clip_low, actor.clip_high
    span = f"actor.clip_low/high {low:g}/{high:g}"
    if published.form in ("sapo", "reinforce") and (low, high) != published.range(level):
        return [f"{span} has no effect: {actor.surrogate} clips nothing"]
    if actor.surrogate != "clip" and published.form not in ("sapo", "reinforce"):
        usual = published.range(level)
        far = any(not 0.1 <= given / known <= 10 for given, known in zip((low, high), usual, strict=True))
        known = f"{usual[0]:g}/{usual[1]:g}"
        return [f"{span} is far from the paper's {known} for {actor.surrogate}: null takes those"] if far else []
    if actor.surrogate != "clip" or actor.clip_fraction is not None:
        return []
    if level != "token" and min(low, high) >= 0.1:
        return [
            f"{span} is a range for token ratios: sequence ratios "
            "stay within a few thousandths of 1, so it will not bind (the paper: 3e-4/4e-4)"
        ]
    if level == "token" and max(low, high) <= 0.01:
        return [
            f"{span} is a range for sequence ratios: most token ratios fall outside it (the paper's GRPO: 0.2/0.27)"
        ]
    return []


def _changed(section: Section, name: str) -> bool:
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _surrogate(recipe: Recipe) -> list[str]:
    """Keys of other surrogates and advantages than the recipe's."""
    actor, found = recipe.actor, []
    if _changed(actor, "dual_clip") and actor.surrogate != "dual_clip":
        found.append("actor.dual_clip is for actor.surrogate: dual_clip")
    if _changed(actor, "sapo_temperature") and actor.surrogate != "sapo":
        found.append("actor.sapo_temperature is for actor.surrogate: sapo")
    if _changed(actor, "advantage_ddof") and actor.advantage not in ("group", "batch"):
        found.append(f"actor.advantage_ddof has no effect: actor.advantage: {actor.advantage} divides by no deviation")
    if _changed(actor, "minirl_cap") and actor.surrogate != "minirl":
        found.append("actor.minirl_cap is for actor.surrogate: minirl")
    if actor.surrogate == "dppo" and actor.old_logprobs == "recompute":
        found.append("actor.surrogate: dppo has its ratios from the engine: actor.old_logprobs: engine spares a pass")
    if _changed(actor, "discount") and all(reward.per == "response" for reward in recipe.reward):
        found.append("actor.discount is for rewards per token or segment: a response's own is not discounted")
    if actor.surrogate == "ppo" and actor.advantage != "gae":
        found.append(f"actor.surrogate: ppo with actor.advantage: {actor.advantage}: no value model is made")
    if actor.surrogate == "dual_clip" and actor.importance_sampling_level != "token":
        found.append(f"actor.dual_clip {actor.dual_clip:g} will not bind: the ratio of a sequence stays near 1")
    if actor.clip_fraction is not None and actor.clip_fraction > (reach := (1 - 1 / actor.mini_batches) / 2):
        found.append(
            f"actor.clip_fraction {actor.clip_fraction:g} is out of reach: the first of {actor.mini_batches} "
            f"mini-batches clips nothing, nor does half of what moves in the others (about {reach:.2g} is left)"
        )
    clips_first = PUBLISHED[actor.surrogate].bounds_ratio and actor.importance_sampling_level != "token"
    if (
        actor.opsm_delta is not None
        and actor.clip_fraction is None
        and actor.old_logprobs == "engine"
        and clips_first
        and math.exp(-actor.opsm_delta) <= 1 - actor.clip_low
    ):
        found.append(
            f"actor.opsm_delta {actor.opsm_delta:g} drops nothing: where Â < 0, what has fallen that far is beyond "
            f"actor.clip_low {actor.clip_low:g} and clipped already"
        )
    return found


def _additions(recipe: Recipe) -> list[str]:
    """Keys of a KL term, a correction or a value model that is not there."""
    actor, found = recipe.actor, []
    if not actor.kl.coefficient and any(_changed(actor.kl, name) for name in ("estimator", "place", "reference")):
        found.append("actor.kl.coefficient is 0: there is no KL term, and no reference model")
    if actor.kl.coefficient and actor.kl.place == "reward" and actor.kl.estimator != "k1":
        found.append(
            f"actor.kl.estimator: {actor.kl.estimator} in the reward: only k1 there leads to the gradient of the KL"
        )
    linear = actor.entropy_bonus != 0 or (actor.kl.coefficient and actor.kl.place == "loss")
    if linear and actor.length_norm != "own":
        divisor = "" if actor.length_norm == "none" else f" over the divisor of length_norm: {actor.length_norm}"
        found.append(
            f"actor.length_norm: {actor.length_norm} sums a response's tokens, while KL and entropy terms keep their "
            f"mean over them: beside the surrogate they are weaker by the length of the response{divisor}"
        )
    far = actor.correction_high is not None and actor.correction_high >= 1.5
    if actor.correction in ("tis", "mis") and actor.correction_level == "sequence" and far:
        found.append(
            f"actor.correction_high {actor.correction_high:g} is a bound for single tokens: the mean ratio of a "
            "sequence stays within a few hundredths of 1, so it will not bind (geometric_mask: 0.99 and 1.01)"
        )
    if actor.correction == "none" and _changed(actor, "correction_level"):
        found.append("actor.correction_level has no effect without an actor.correction")
    published, bounds = CORRECTIONS[actor.correction], (actor.correction_low, actor.correction_high)
    for name, given, known in zip(("low", "high"), bounds, (published.low, published.high), strict=True):
        if given is not None and known is None and (name, actor.correction) != ("high", "decoupled"):
            found.append(f"actor.correction_{name} has no effect with actor.correction: {actor.correction}")
    if actor.advantage != "gae" and any(_changed(recipe.critic, name) for name in type(recipe.critic).model_fields):
        found.append("critic is for actor.advantage: gae: no value model is made")
    elif _changed(recipe.critic, "coefficient") and recipe.critic.trunk == "own":
        found.append("critic.coefficient is for critic.trunk: shared")
    return found


def _selection(recipe: Recipe) -> list[str]:
    """Keys about which responses train that have nothing to choose from."""
    rollout, found = recipe.rollout, []
    if rollout.overlong == "penalty" and rollout.overlong_margin == 0:
        found.append("rollout.overlong: penalty with overlong_margin 0 takes nothing off")
    if rollout.dynamic_sampling and rollout.max_rounds == 1:
        found.append("rollout.max_rounds 1: dynamic sampling has no round to replace a group in")
    if _changed(rollout, "max_rounds") and not rollout.dynamic_sampling:
        found.append("rollout.max_rounds is for rollout.dynamic_sampling")
    if _changed(rollout, "overlong_margin") and rollout.overlong != "penalty":
        found.append("rollout.overlong_margin is for rollout.overlong: penalty")
    if rollout.segment_separator is not None and all(reward.per != "segment" for reward in recipe.reward):
        found.append("rollout.segment_separator is for rewards per segment")
    return found


def _sampling(recipe: Recipe) -> list[str]:
    rollout, found = recipe.rollout, []
    if rollout.top_p < 1 or rollout.top_k > 0:
        found.append(
            "rollout.top_p/top_k cut the distribution that is sampled, while ratios are those of the whole "
            "distribution: the responses are not quite π_old's"
        )
    if rollout.max_rows < rollout.group_size:
        found.append(f"rollout.max_rows {rollout.max_rows} is less than a group: a group is decoded whole all the same")
    if not recipe.queries.shuffle and recipe.cold_start.steps:
        found.append("queries.shuffle: false orders the queries of RL; the cold start's demonstrations are shuffled")
    return found


def _optimizer(recipe: Recipe) -> list[str]:
    sections = {"actor": recipe.actor.optimizer, "cold_start": recipe.cold_start.optimizer}
    updates = {"actor": recipe.steps * recipe.actor.mini_batches, "cold_start": recipe.cold_start.steps}
    if recipe.actor.advantage == "gae":
        sections["critic"], updates["critic"] = recipe.critic.optimizer, updates["actor"]
    late = [
        f"{name}.optimizer.warmup_steps {optimizer.warmup_steps} is not over within the {updates[name]} optimiser steps"
        for name, optimizer in sections.items()
        if 0 < updates[name] <= optimizer.warmup_steps
    ]
    return late + [
        f"{name}.optimizer.min_lr_fraction has no effect with a constant schedule"
        for name, optimizer in sections.items()
        if optimizer.schedule == "constant" and optimizer.min_lr_fraction > 0
    ]


def _queries(recipe: Recipe) -> list[str]:
    queries, found = recipe.queries, []
    if queries.split != "train" and (queries.path is None or names_file(queries.path)):
        found.append(f"queries.split {queries.split} is for a hub id: there is no such data set here")
    evaluation = recipe.evaluation
    if evaluation.split != "test" and (evaluation.path is None or names_file(evaluation.path)):
        found.append(f"evaluation.split {evaluation.split} is for a hub id in evaluation.path")
    if queries.config is not None and queries.path is None:
        found.append("queries.config is for a hub id in queries.path")
    if queries.prompt is not None and queries.procedural is not None:
        found.append("queries.prompt names a column of a file: a procedural task has none")
    return found


def _sections(recipe: Recipe) -> list[str]:
    found = []
    if recipe.cold_start.steps == 0 and (recipe.cold_start.path or recipe.cold_start.demonstrations):
        found.append("cold_start.steps is 0: its demonstrations are not used")
    if recipe.checkpoint.every > recipe.steps:
        found.append(f"checkpoint.every {recipe.checkpoint.every} is beyond the last step, {recipe.steps}")
    if recipe.evaluation.num_queries == 0 and (recipe.evaluation.every or recipe.evaluation.path):
        found.append("evaluation.num_queries is 0: nothing is evaluated")
    elif recipe.evaluation.every > recipe.steps:
        found.append(f"evaluation.every {recipe.evaluation.every} is beyond the last step, {recipe.steps}")
    divides = recipe.actor.advantage in ("group", "batch") and recipe.rollout.overlong != "penalty"
    if divides and len(recipe.reward) == 1 and recipe.reward[0].weight not in (0, 1) and recipe.reward[0].weight > 0:
        found.append(
            "reward.0.weight scales the only reward: advantages are normalised, so it only changes reward/mean"
        )
    found += [f"reward.{i}.weight is 0: measured only" for i, reward in enumerate(recipe.reward) if reward.weight == 0]
    return found


def _report(recipe: Recipe) -> list[str]:
    report, found = recipe.report, []
    if report.project != "gspo" and not {"trackio", "wandb"} & set(report.trackers):
        found.append("report.project is for the trackers trackio and wandb: report.trackers names neither")
    if not report.rollouts and not report.tokens:
        found.append("report.tokens has no effect with report.rollouts: false, which writes no responses at all")
    return found
