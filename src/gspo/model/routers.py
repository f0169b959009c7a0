"""The routers among a model's modules: transformers declares them, and a proof at load shows they can be replayed."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gspo.errors import UserError
from gspo.model.prove import MISFITS, disagreement, probe_ids
from gspo.model.routing import Routing, UnknownRouterError, chosen_experts
from gspo.recipe.sections import ActorConfig

_ROUTER = re.compile(r"Router|TopKGating")  # the name of a class that transformers does not declare
_EXPERTS = re.compile(r"Router|TopKGating|Experts")


def find_routing(model: Any, trunk: Any) -> tuple[Routing | None, str | None]:
    """Watch the model's routers. Without routers that can be replayed: None, and the reason if the model has experts.

    The proof, on a few tokens: replaying the recorded experts changes nothing; any other experts are used, each with
    its weight, and change what the model computes, whichever layer they are in.
    """
    suspects = _suspects(model)
    if not suspects:
        experts = {name for module in trunk.modules() if "Experts" in (name := type(module).__name__)}
        return None, f"{', '.join(sorted(experts))}: no router beside these" if experts else None
    forwards = [router.forward for router in suspects]
    try:
        return _watched(trunk, suspects), None
    except (UnknownRouterError, *MISFITS) as error:
        for router, forward in zip(suspects, forwards, strict=True):
            router.forward = forward
        return None, f"{', '.join(sorted({type(router).__name__ for router in suspects}))}: {error}"


def check_declared(actor: ActorConfig, config: Any) -> None:
    """UserError where the recipe is about experts and the code of the model's architecture has none."""
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None or _declared([kind]) or any(map(_EXPERTS.search, vars(sys.modules[kind.__module__]))):
        return
    refuse_experts(actor, kind.__name__, None)


def refuse_experts(actor: ActorConfig, model_name: str, reason: str | None) -> None:
    """UserError where the recipe is about experts: the model has no routers, or with a reason, unknown ones."""
    if actor.routing_replay != "none":
        key, off = "actor.routing_replay", "none"
    elif actor.router_aux_loss:
        key, off = "actor.router_aux_loss", "0"
    else:
        return
    problem, fix = f"{model_name} is no mixture of experts: it has no router", f"set {key} to {off}"
    if reason is not None:
        problem = f"the routers of {model_name} are of a kind that gspo cannot watch or overrule: {reason}"
        fix += ", or use a model of another family (docs/experts.md lists which can be replayed)"
    raise UserError(problem, where=key, fix=fix)


def _watched(trunk: Any, suspects: Sequence[nn.Module]) -> Routing:
    """The routing of those suspects that a pass over text calls, proven."""
    outputs = _outputs(trunk, suspects)
    if not outputs:
        raise UnknownRouterError("no pass over text calls it")
    sizes = {(output[0].shape[-1], chosen_experts(output).shape[-1]) for output in outputs.values()}
    if len(sizes) > 1:
        raise UnknownRouterError("its layers differ in their numbers of experts")
    num_experts, top_k = sizes.pop()
    logits = torch.cat([output[0] for output in outputs.values()]).float()
    gives_probabilities = bool((logits >= 0).all()) and torch.allclose(logits.sum(-1), logits.new_ones(()), atol=1e-2)
    routing = Routing(list(outputs), num_experts=num_experts, top_k=top_k, gives_probabilities=gives_probabilities)
    _prove(trunk, routing, list(outputs))
    return routing


def _suspects(model: Any) -> list[Any]:
    """The modules that may be routers, in the order of the layers."""
    declared = _declared(model.modules())
    return [m for m in model.modules() if isinstance(m, declared) or _ROUTER.search(type(m).__name__)]


def _declared(modules: Iterable[Any]) -> tuple[type, ...]:
    """The classes of routers that transformers names on models, or on their classes."""
    classes = set()
    for module in modules:
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for entry in recorder if isinstance(recorder, list) else [recorder]:
            classes.add(getattr(entry, "target_class", entry))
    return tuple(kind for kind in classes if isinstance(kind, type))


@torch.no_grad()
def _states(trunk: Any) -> Tensor:
    states: Tensor = trunk(input_ids=probe_ids(trunk)[None], use_cache=False).last_hidden_state
    return states


def _outputs(trunk: Any, modules: Sequence[nn.Module]) -> dict[nn.Module, Any]:
    """The output of each module in a pass over the probe, without those that the pass does not call."""
    outputs: dict[nn.Module, Any] = dict.fromkeys(modules)
    hooks = [module.register_forward_hook(lambda module, _, out: outputs.update({module: out})) for module in modules]
    try:
        _states(trunk)
    finally:
        for hook in hooks:
            hook.remove()
    return {module: output for module, output in outputs.items() if output is not None}


def _prove(trunk: Any, routing: Routing, routers: Sequence[nn.Module]) -> None:
    def replayed(experts: Tensor) -> Tensor:
        with routing.traced(experts):
            return _states(trunk)

    with routing.traced() as trace:
        plain = _states(trunk)
    chosen = trace.experts.long()
    if reason := disagreement(lambda: plain, lambda: replayed(chosen)):
        raise UnknownRouterError(f"with its own experts replayed, {reason}")
    others = (chosen + 1) % routing.num_experts
    with routing.traced(others):
        outputs = _outputs(trunk, routers)
    for layer, output in enumerate(outputs.values()):
        weights = next((part for part in output[1:] if part.is_floating_point()), None)
        if weights is None or not torch.equal(chosen_experts(output), others[:, layer]):
            raise UnknownRouterError("it does not use the experts that are replayed")
        if weights.shape != others[:, layer].shape or not (weights.isfinite() & (weights > 0)).all():
            raise UnknownRouterError("experts that are replayed get no weight of their own")
    for layer in range(routing.num_layers if routing.top_k < routing.num_experts else 0):
        changed = chosen.clone()
        changed[:, layer] = others[:, layer]
        if torch.equal(replayed(changed), plain):
            raise UnknownRouterError("the model does not use the experts that its router returns")
