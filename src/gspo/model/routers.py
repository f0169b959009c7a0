"""The routers among a model's modules, found by what transformers declares, and proven to be replayable."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gspo.model.routing import Routing, UnknownRouterError, chosen_experts
from gspo.model.trunk import same

_NAMED = re.compile(r"Router|TopKGating")  # a class that transformers does not declare
_EXPERTS = re.compile(r"Router|TopKGating|Experts")
_PROBE = 8  # tokens


def find_routing(model: Any, trunk: Any) -> Routing | None:
    """Watch the model's routers; None where it has no experts. UnknownRouterError for routers of another kind.

    Proven on a few tokens: replaying what was recorded changes nothing; any other experts are used as told, each with a
    weight of its own, and change what the model computes, whichever layer they are in.
    """
    suspects = _suspects(model)
    if not suspects:
        experts = {name for module in trunk.modules() if "Experts" in (name := type(module).__name__)}
        if experts:
            raise UnknownRouterError(f"{', '.join(sorted(experts))}: no router beside these")
        return None
    forwards = [router.forward for router in suspects]
    try:
        return _watched(trunk, suspects)
    except (UnknownRouterError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        for router, forward in zip(suspects, forwards, strict=True):
            router.forward = forward
        names = ", ".join(sorted({type(router).__name__ for router in suspects}))
        raise UnknownRouterError(f"{names}: {error}") from None


def routing_or_reason(model: Any, trunk: Any) -> tuple[Routing | None, str | None]:
    """What `find_routing` finds, or why it refuses."""
    try:
        return find_routing(model, trunk), None
    except UnknownRouterError as error:
        return None, str(error)


def may_have_experts(kind: type) -> bool:
    """Whether a model's class declares routers, or lies in one file with classes named for routers or experts."""
    return bool(_declared([kind])) or any(_EXPERTS.search(name) for name in vars(sys.modules[kind.__module__]))


def _watched(trunk: Any, suspects: Sequence[nn.Module]) -> Routing:
    """Those of the suspects that a pass over text calls, proven."""
    outputs = _outputs(trunk, suspects)
    called = [(router, output) for router, output in zip(suspects, outputs, strict=True) if output is not None]
    if not called:
        raise UnknownRouterError("no pass over text calls it")
    sizes = {(output[0].shape[-1], chosen_experts(output).shape[-1]) for _, output in called}
    if len(sizes) > 1:
        raise UnknownRouterError("its layers differ in their numbers of experts")
    num_experts, top_k = sizes.pop()
    routers = [router for router, _ in called]
    logits = torch.cat([output[0] for _, output in called]).float()
    gives_probabilities = bool((logits >= 0).all()) and torch.allclose(logits.sum(-1), logits.new_ones(()), atol=1e-2)
    routing = Routing(routers, num_experts=num_experts, top_k=top_k, gives_probabilities=gives_probabilities)
    _prove(trunk, routing, routers)
    return routing


def _suspects(model: Any) -> list[Any]:
    """In the order of the layers."""
    declared = _declared(model.modules())
    return [m for m in model.modules() if isinstance(m, declared) or _NAMED.search(type(m).__name__)]


def _declared(modules: Iterable[Any]) -> tuple[type, ...]:
    """The classes of routers that transformers names on models, or on their classes."""
    found = []
    for module in modules:
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for one in recorder if isinstance(recorder, list) else [recorder]:
            found.append(getattr(one, "target_class", one))
    return tuple({kind for kind in found if isinstance(kind, type)})


@torch.no_grad()
def _states(trunk: Any) -> Tensor:
    embedding = trunk.get_input_embeddings().weight
    ids = torch.arange(1, _PROBE + 1, device=embedding.device)[None] % len(embedding)
    states: Tensor = trunk(input_ids=ids, use_cache=False).last_hidden_state
    return states


def _outputs(trunk: Any, modules: Sequence[nn.Module]) -> list[Any]:
    """What each module returns in a pass; None for one that is not called."""
    found: dict[nn.Module, Any] = {}
    hooks = [
        module.register_forward_hook(lambda module, _, output: found.__setitem__(module, output)) for module in modules
    ]
    try:
        _states(trunk)
    finally:
        for hook in hooks:
            hook.remove()
    return [found.get(module) for module in modules]


def _prove(trunk: Any, routing: Routing, routers: Sequence[nn.Module]) -> None:
    with routing.traced() as trace:
        plain = _states(trunk)
    own = trace.experts.long()
    with routing.traced(own):
        replayed = _states(trunk)
    if not same(replayed, plain):
        raise UnknownRouterError("with its own experts replayed, the model computes something else")
    others = (own + 1) % routing.num_experts
    with routing.traced(others):
        outputs = _outputs(trunk, routers)
    for layer, output in enumerate(outputs):
        weights = next((part for part in output[1:] if part.is_floating_point()), None)
        if weights is None or not torch.equal(chosen_experts(output), others[:, layer]):
            raise UnknownRouterError("it does not use the experts it is told to")
        if weights.shape != others[:, layer].shape or not (weights.isfinite() & (weights > 0)).all():
            raise UnknownRouterError("experts that are replayed get no weight of their own")
    for layer in range(routing.num_layers if routing.top_k < routing.num_experts else 0):
        told = own.clone()
        told[:, layer] = others[:, layer]
        with routing.traced(told):
            if torch.equal(_states(trunk), replayed):
                raise UnknownRouterError("the model does not use the experts that its router returns")
