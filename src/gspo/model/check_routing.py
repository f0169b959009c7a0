"""Whether a recipe that is about experts has a model with routers, of a kind that can be watched and overruled."""

from typing import Any

from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.model.routers import may_have_experts
from gspo.recipe.schema import ActorConfig

_OFF = {
    "actor.routing_replay": "set actor.routing_replay to none",
    "actor.router_aux_loss": "set actor.router_aux_loss to 0",
}


def check_declared(actor: ActorConfig, config: Any) -> None:
    """UserError where the recipe is about experts and the code of the model's architecture has none."""
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if (key := _asks_for_experts(actor)) and kind is not None and not may_have_experts(kind):
        raise _no_router(key, kind.__name__)


def check_routing(actor: ActorConfig, policy: Policy) -> None:
    """UserError where the recipe is about experts and the model has none, or routers that gspo does not know."""
    if policy.routing is not None or not (key := _asks_for_experts(actor)):
        return
    if policy.unknown_routers is None:
        raise _no_router(key, type(policy.model).__name__)
    raise UserError(
        f"the routers of {type(policy.model).__name__} are of a kind that gspo cannot watch or overrule: "
        f"{policy.unknown_routers}",
        where=key,
        fix=f"{_OFF[key]}, or take a model of another family (docs/experts.md has which can be)",
    )


def _asks_for_experts(actor: ActorConfig) -> str | None:
    """The key that does."""
    if actor.routing_replay != "none":
        return "actor.routing_replay"
    return "actor.router_aux_loss" if actor.router_aux_loss else None


def _no_router(key: str, name: str) -> UserError:
    return UserError(f"{name} is no mixture of experts: it has no router", where=key, fix=_OFF[key])
