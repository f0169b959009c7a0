"""The routers of a mixture-of-experts model: the experts of each token, recorded and replayed (2507.18071, §5.3).

transformers declares which modules are routers, and a proof at load shows that they can be replayed.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gspo.errors import UserError
from gspo.model.prove import MISFITS, disagreement, trunk_states
from gspo.recipe.sections import ActorConfig

_ROUTER = re.compile(r"Router|TopKGating")  # the name of a class that transformers does not declare
_EXPERTS = re.compile(r"Router|TopKGating|Experts")


class UnknownRouterError(Exception):
    """A router does not choose its experts in the way that `Routing` can replace; the text says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """The choices of L routers for the N tokens of one forward pass.

    Example: after a pass through two routers, chosen is {0: [N, K], 1: [N, K]}, experts is [N, 2, K].
    """

    replay: Integer[Tensor, "N L K"] | None  # the experts to be used in place of the routers' choice
    keeps_logits: bool
    num_layers: int  # L
    dtype: torch.dtype  # the smallest integers that hold the number of an expert
    chosen: dict[int, Tensor] = field(default_factory=dict)  # by layer, in each router's order, whatever is replayed
    logits: dict[int, Tensor] = field(default_factory=dict)  # by layer, with their gradients, where they are kept

    @property
    def experts(self) -> Integer[Tensor, "N L K"]:
        """The routers' choice."""
        return torch.stack([self.chosen[layer] for layer in range(self.num_layers)], dim=1).to(self.dtype)

    @property
    def router_logits(self) -> tuple[Float[Tensor, "N E"], ...]:
        """The routers' logits, layer by layer; none unless they are kept."""
        return tuple(self.logits[layer] for layer in sorted(self.logits))


class Routing:
    """The L routers of a model, each of which chooses K of E experts a token; all are watched from here on.

    A router is a module that returns its logits and the indices of its experts, and picks those by `torch.topk`. A
    replay replaces the pick alone. Everything else of the router runs as its model has it, so that the weights of the
    replayed experts come from the live logits, with their gradients. A deep copy of the model would call the routers
    that are watched here: load a second model instead.
    """

    def __init__(
        self, routers: Sequence[nn.Module], *, num_experts: int, top_k: int, gives_probabilities: bool
    ) -> None:
        self.num_layers, self.num_experts, self.top_k = len(routers), num_experts, top_k
        self.gives_probabilities = gives_probabilities  # in place of logits
        self.dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._trace: Trace | None = None
        for layer, router in enumerate(routers):
            router.forward = self._watched(layer, router.forward)

    @contextmanager
    def traced(self, replay: Integer[Tensor, "N L K"] | None = None, *, keep_logits: bool = False) -> Iterator[Trace]:
        """Record one forward pass within, its experts replaced by `replay` where that is given."""
        before, self._trace = (
            self._trace,
            Trace(replay=replay, keeps_logits=keep_logits, num_layers=self.num_layers, dtype=self.dtype),
        )
        try:
            yield self._trace
        finally:
            self._trace = before

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The context_fn of torch.utils.checkpoint: the recomputation replays the experts that the pass replayed."""
        if self._trace is None:
            return nullcontext(), nullcontext()
        return nullcontext(), self.traced(self._trace.replay)

    def _watched(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            trace = self._trace
            if trace is None:
                return forward(*args, **kwargs)
            replay = None if trace.replay is None else trace.replay[:, layer].long()
            with nullcontext() if replay is None else _ReplacedTopK(replay, self.num_experts) as pick:
                output = forward(*args, **kwargs)
            chosen = _chosen_experts(output) if pick is None else pick.original
            if chosen is None:
                raise UnknownRouterError("it does not pick its experts by topk")
            trace.chosen[layer] = chosen
            if trace.keeps_logits:
                trace.logits[layer] = output[0].float().log() if self.gives_probabilities else output[0]
            return output

        return watched


class _ReplacedTopK(TorchFunctionMode):
    """A mode for a router's forward: the last top-k of K of E experts a token picks the given experts."""

    def __init__(self, experts: Int[Tensor, "N K"], num_experts: int) -> None:
        super().__init__()
        self._experts, self._num_experts = experts, num_experts
        self.original: Int[Tensor, "N K"] | None = None  # the experts that the router would have picked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return result
        scores = args[0] if args else kwargs["input"]
        # A router that first picks groups of experts does so over tensors of other shapes.
        if result.indices.shape != self._experts.shape or scores.shape[-1] != self._num_experts:
            return result
        self.original = result.indices
        return torch.return_types.topk((scores.gather(-1, self._experts), self._experts))


def traced(
    routing: Routing | None, replay: Integer[Tensor, "N L K"] | None = None, *, keep_logits: bool = False
) -> AbstractContextManager[Trace | None]:
    """`Routing.traced`, or nothing for a model without routers."""
    return nullcontext() if routing is None else routing.traced(replay, keep_logits=keep_logits)


def find_routing(model: Any, trunk: Any) -> tuple[Routing | None, str | None]:
    """Watch the model's routers. Without routers that can be replayed: None, and the reason if the model has experts.

    The proof, on a few tokens: replaying the recorded experts changes nothing; any other experts are used, each with
    its weight, and change what the model computes, whichever layer they are in.
    """
    if not (suspects := routers_in(model)):
        experts = {name for module in trunk.modules() if "Experts" in (name := type(module).__name__)}
        return None, f"{', '.join(sorted(experts))}: no router beside these" if experts else None
    forwards = [router.forward for router in suspects]
    try:
        return _watched_and_proven(trunk, suspects), None
    except (UnknownRouterError, *MISFITS) as error:
        for router, forward in zip(suspects, forwards, strict=True):
            router.forward = forward
        return None, f"{', '.join(sorted({type(router).__name__ for router in suspects}))}: {error}"


def routers_in(model: Any) -> list[nn.Module]:
    """The modules that transformers declares to be routers, or that are called so."""
    declared = _declared(model.modules())
    return [m for m in model.modules() if isinstance(m, declared) or _ROUTER.search(type(m).__name__)]


def check_declared(actor: ActorConfig, config: Any) -> None:
    """Raise UserError where the recipe is about experts and the code of the model's architecture has none."""
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind and not _declared([kind]) and not any(map(_EXPERTS.search, vars(sys.modules[kind.__module__]))):
        refuse_experts(actor, kind.__name__, None)


def refuse_experts(actor: ActorConfig, model_name: str, reason: str | None) -> None:
    """Raise UserError where the recipe is about experts: the model has no routers, or with a reason, unknown ones."""
    problem, other = f"{model_name} is no mixture of experts: it has no router", ""
    if reason is not None:
        problem = f"the routers of {model_name} are of a kind that gspo cannot watch or overrule: {reason}"
        other = ", or use a model of another family (docs/concepts/experts.md lists which can be replayed)"
    for key, off in (("routing_replay", "none"), ("router_aux_loss", 0)):
        if getattr(actor, key) != off:
            raise UserError(problem, where=f"actor.{key}", fix=f"set actor.{key} to {off}{other}")


def _declared(modules: Iterable[Any]) -> tuple[type, ...]:
    """The classes of routers that transformers names on models, or on their classes."""
    classes = set()
    for module in modules:
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for entry in recorder if isinstance(recorder, list) else [recorder]:
            classes.add(getattr(entry, "target_class", entry))
    return tuple(kind for kind in classes if isinstance(kind, type))


def _watched_and_proven(trunk: Any, suspects: Sequence[nn.Module]) -> Routing:
    """The routing of those suspects that a pass over text calls."""
    outputs = _outputs(trunk, suspects)
    if not outputs:
        raise UnknownRouterError("no pass over text calls it")
    sizes = {(output[0].shape[-1], _chosen_experts(output).shape[-1]) for output in outputs.values()}
    if len(sizes) > 1:
        raise UnknownRouterError("its layers differ in their numbers of experts")
    ((num_experts, top_k),) = sizes
    logits = torch.cat([output[0] for output in outputs.values()]).float()
    gives_probabilities = bool((logits >= 0).all()) and torch.allclose(logits.sum(-1), logits.new_ones(()), atol=1e-2)
    routing = Routing(list(outputs), num_experts=num_experts, top_k=top_k, gives_probabilities=gives_probabilities)
    _prove(trunk, routing, list(outputs))
    return routing


@torch.no_grad()
def _prove(trunk: Any, routing: Routing, routers: Sequence[nn.Module]) -> None:
    def replayed(experts: Tensor) -> Tensor:
        with routing.traced(experts):
            return trunk_states(trunk)

    with routing.traced() as trace:
        plain = trunk_states(trunk)
    chosen = trace.experts.long()
    if reason := disagreement(lambda: plain, lambda: replayed(chosen)):
        raise UnknownRouterError(f"with its own experts replayed, {reason}")
    others = (chosen + 1) % routing.num_experts
    with routing.traced(others):
        outputs = _outputs(trunk, routers)
    for layer, output in enumerate(outputs.values()):
        weights = next((part for part in output[1:] if part.is_floating_point()), None)
        if weights is None or not torch.equal(_chosen_experts(output), others[:, layer]):
            raise UnknownRouterError("it does not use the experts that are replayed")
        if weights.shape != others[:, layer].shape or not (weights.isfinite() & (weights > 0)).all():
            raise UnknownRouterError("experts that are replayed get no weight of their own")
    for layer in range(routing.num_layers if routing.top_k < routing.num_experts else 0):
        changed = chosen.clone()
        changed[:, layer] = others[:, layer]
        if torch.equal(replayed(changed), plain):
            raise UnknownRouterError("the model does not use the experts that its router returns")


@torch.no_grad()
def _outputs(trunk: Any, modules: Sequence[nn.Module]) -> dict[nn.Module, Any]:
    """The output of each module in a pass over the probe, without those that the pass does not call."""
    outputs: dict[nn.Module, Any] = dict.fromkeys(modules)
    hooks = [module.register_forward_hook(lambda module, _, out: outputs.update({module: out})) for module in modules]
    try:
        trunk_states(trunk)
    finally:
        for hook in hooks:
            hook.remove()
    return {module: output for module, output in outputs.items() if output is not None}


def _chosen_experts(output: Any) -> Int[Tensor, "N K"]:
    """The indices in a router's output (logits, weights, indices); UnknownRouterError for another kind of output."""
    indices = [part for part in output if isinstance(part, Tensor) and not part.is_floating_point()]
    if not isinstance(output, tuple) or len(indices) != 1 or output[0].dim() != 2 or indices[0].dim() != 2:
        raise UnknownRouterError("it does not return (logits, weights, indices)")
    return indices[0]
