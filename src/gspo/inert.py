"""Settings that a recipe states but that cannot have an effect in it: nothing is ignored in silence."""

from gspo.config import Recipe
from gspo.queries.files import names_file


def inert_settings(recipe: Recipe) -> list[str]:
    """One sentence for each setting that does nothing, or not what its reader would think, in this recipe."""
    return [*_ratio(recipe), *_sampling(recipe), *_optimizer(recipe), *_queries(recipe), *_sections(recipe)]


def _ratio(recipe: Recipe) -> list[str]:
    actor, found = recipe.actor, []
    level = actor.importance_sampling_level
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
            "actor.mini_batches is 1: each rollout batch gets one update, so every importance ratio is 1, "
            "nothing is ever clipped, and GSPO, GSPO-token and GRPO are the same"
        )
    if level == "sequence_token":
        found.append(
            "actor.importance_sampling_level: sequence_token equals sequence here, "
            "for every token of a response has the same advantage"
        )
    if level != "token" and min(actor.clip_low, actor.clip_high) >= 0.1:
        found.append(
            f"actor.clip_low/high {actor.clip_low:g}/{actor.clip_high:g} is a range for token ratios: sequence ratios "
            "stay within a few thousandths of 1, so it will not bind (the paper: 3e-4/4e-4)"
        )
    if level == "token" and max(actor.clip_low, actor.clip_high) <= 0.01:
        found.append(
            f"actor.clip_low/high {actor.clip_low:g}/{actor.clip_high:g} is a range for sequence ratios: "
            "most token ratios fall outside it (the paper's GRPO: 0.2/0.27)"
        )
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
    if len(recipe.reward) == 1 and recipe.reward[0].weight not in (0, 1):
        found.append(
            "reward.0.weight scales the only reward: advantages are normalised, so it only changes reward/mean"
        )
    found += [f"reward.{i}.weight is 0: measured only" for i, reward in enumerate(recipe.reward) if reward.weight == 0]
    return found
