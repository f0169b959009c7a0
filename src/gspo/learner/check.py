"""Whether a recipe can be trained, as far as that shows without weights."""

import re
from typing import Any

from gspo.errors import UserError
from gspo.learner.optimizer import check_optimizer
from gspo.model.load import empty_model
from gspo.model.lora import add_lora, quantization
from gspo.model.parameters import freeze, matching
from gspo.model.policy import device_of, dtype_of
from gspo.model.sharding import check_shardable
from gspo.recipe.schema import Recipe


def check_training(recipe: Recipe, config: Any, *, num_ranks: int = 1) -> list[str]:
    """Try the optimisers, and choose parameters by their names; sentences on what to expect of it.

    UserError where something cannot be used, also by as many ranks as will share the model.
    """
    actor, model, notes = recipe.actor, recipe.model, list[str]()
    settings = {"actor.optimizer": actor.optimizer}
    settings |= {"cold_start.optimizer": recipe.cold_start.optimizer} if recipe.cold_start.steps else {}
    critics = {"critic.optimizer": recipe.critic.optimizer} if actor.advantage == "gae" else {}
    for where, optimizer in (settings | critics).items():
        if optimizer.name != "adamw" or optimizer.options:
            notes += check_optimizer(optimizer, where=where, device=device_of(model.device), num_ranks=num_ranks)
    if num_ranks > 1 and re.fullmatch(r"(?!cpu).*:\d+", model.device):
        what = f"all {num_ranks} processes would compute on this one"
        fix = f"set model.device: {model.device.partition(':')[0]}, of which each process takes its own"
        raise UserError(what, where=f"model.device: {model.device}", fix=fix)
    if num_ranks > 1:
        check_shardable(empty_model(model, config))
    if (
        model.attn_implementation
        or model.frozen
        or model.lora is not None
        or any(optimizer.no_decay for optimizer in (settings | critics).values())
    ):
        empty = empty_model(model, config)
        freeze(empty, model.frozen)
        if model.lora is not None:
            quantization(model.lora, device_of(model.device), dtype_of(model), is_sharded=num_ranks > 1)
            add_lora(empty, model.lora, is_sharded=num_ranks > 1)
        trained = [name for name, parameter in empty.named_parameters() if parameter.requires_grad]
        for where, optimizer in settings.items():
            matching(optimizer.no_decay, trained, where=f"{where}.no_decay")
        if critics:
            trunk = dict(empty.base_model.named_parameters()) if recipe.critic.trunk == "own" else {}
            names = ["head.weight", "head.bias", *(f"trunk.{name}" for name in trunk)]
            matching(recipe.critic.optimizer.no_decay, names, where="critic.optimizer.no_decay")
    return notes
