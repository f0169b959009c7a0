"""The models that a run trains or measures from, loaded on every rank."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gspo.learner.ranks import sharding_of
from gspo.model.load import turn_end
from gspo.model.lora import copied_adapter, read_adapter
from gspo.model.policy import Policy, checkpoint_gradients, device_of, dtype_of, load_policy, try_save
from gspo.model.routing import refuse_experts
from gspo.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Models:
    """The policy, and what the recipe has beside it.

    Example: load_models(recipe, tokenizer).reference is None where actor.kl.coefficient is 0.
    """

    policy: Policy
    reference: Policy | None = None  # that a KL term measures from
    value_trunk: Policy | None = None  # what a critic of its own is made of
    teacher: Policy | None = None  # the policy itself, where it is to teach itself


def load_models(
    recipe: Recipe, tokenizer: Any, *, weights: Path | None = None, reference_weights: Path | None = None
) -> Models:
    """The policy and, where the recipe has them, reference, value model and teacher: loaded too, for none is a copy.

    Those that are to take the policy's weights are made from the same files as it. `weights` stand in for those of
    recipe.model. A reference that is neither named nor refreshed has `reference_weights`, by default the recipe's.
    """
    model, kl, named = recipe.model, recipe.actor.kl, recipe.actor.kl.reference
    is_whole = weights is not None and model.lora is None
    ends = () if is_whole else turn_end(tokenizer, recipe.queries)  # a saved model has those it was trained with
    stop_tokens = (*recipe.rollout.stop_tokens, *ends)
    load = partial(load_policy, tokenizer=tokenizer, seed=recipe.seed, stop_tokens=stop_tokens)
    device, dtype = device_of(model.device), dtype_of(model)
    load.keywords["sharding"] = sharding_of(recipe.trainer.sharding, device, dtype)
    policy, reference, value_trunk, teacher = load(model, weights=weights), None, None, None
    other: dict[str, Any] = {"architecture": None, "tokenizer": None, "kwargs": {}, "frozen": (), "lora": None}
    try_save(policy.model, tokenizer, where=str(model.path or "model.architecture"))
    if kl.coefficient and named is not None:  # whose files have none of the policy's peculiarities
        reference = load(model.model_copy(update={**other, "path": named}))
    elif kl.coefficient and model.lora is not None:  # the same model, with the adapter that RL starts with
        if reference_weights is not None:
            read_adapter(policy.model, reference_weights)
        reference = replace(policy, adapter=copied_adapter(policy.model))
    elif kl.coefficient:  # where it is refreshed, the checkpoint has its weights, and puts them in
        reference = load(model, weights=weights if kl.refresh_steps else reference_weights)
    if model.lora is not None and weights is not None:
        read_adapter(policy.model, weights)
    if recipe.actor.advantage == "gae" and recipe.critic.trunk == "own":
        value_trunk = load(model, weights=weights)
    if recipe.teacher.path is not None:
        teacher = load(model.model_copy(update={**other, "path": recipe.teacher.path}))
    elif recipe.teacher.is_on and not recipe.teacher.url:
        teacher = policy
    if policy.routing is None:
        refuse_experts(recipe.actor, type(policy.model).__name__, policy.unknown_routers)
    if recipe.actor.gradient_checkpointing:
        for trained in filter(None, (policy, value_trunk)):
            checkpoint_gradients(trained)
    return Models(policy=policy, reference=reference, value_trunk=value_trunk, teacher=teacher)
