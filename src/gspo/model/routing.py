"""The routers of a mixture-of-experts model: which experts each token goes to, recorded and replayed (§5.3)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class UnknownRouterError(Exception):
    """A router that does not choose as `Routing` knows it; its text names the class."""


class Trace:
    """What L routers did with the N tokens of one forward pass."""

    def __init__(self, routing: "Routing", replay: Integer[Tensor, "N L K"] | None, *, keep_logits: bool) -> None:
        self.replay = replay  # the experts to be used in place of the routers' own choice
        self.keep_logits = keep_logits
        self._routing = routing
        self._chosen: list[Tensor | None] = [None] * routing.num_layers
        self._logits: list[Tensor | None] = [None] * routing.num_layers

    def note(self, layer: int, chosen: Int[Tensor, "N K"], logits: Float[Tensor, "N E"]) -> None:
        """What a router has chosen, in its own order, or would have, had it not been overruled."""
        self._chosen[layer] = chosen
        if self.keep_logits:
            self._logits[layer] = logits.float().log() if self._routing.gives_probabilities else logits

    @property
    def experts(self) -> Integer[Tensor, "N L K"]:
        """The routers' own choice, in the smallest integers that hold it."""
        chosen = [one for one in self._chosen if one is not None]
        assert len(chosen) == self._routing.num_layers, "a pass left routers out"
        return torch.stack(chosen, dim=1).to(self._routing.dtype)

    @property
    def logits(self) -> list[Float[Tensor, "N E"]]:
        """Of each layer, with their gradients."""
        return [logits for logits in self._logits if logits is not None]


class Routing:
    """The L routers of a model, each choosing K of E experts a token; every one of them is watched from here on.

    A router is a module that returns its logits and the chosen experts' indices and picks those by `torch.topk`: where
    experts are replayed, the pick alone is replaced. Everything else of the router runs as its model has it, so that
    the weights of the replayed experts come from the live logits, with their gradients. A deep copy of the model would
    still call the routers watched here: a second model has to be loaded.
    """

    def __init__(
        self, routers: Sequence[nn.Module], *, num_experts: int, top_k: int, gives_probabilities: bool = False
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
        trace = Trace(self, replay, keep_logits=keep_logits)
        with self._tracing(trace):
            yield trace

    def checkpoint_contexts(self) -> Contexts:
        """For torch.utils.checkpoint: what is computed again in the backward pass replays what the pass replayed."""
        if self._trace is None:
            return nullcontext(), nullcontext()
        return nullcontext(), self._tracing(Trace(self, self._trace.replay, keep_logits=False))

    @contextmanager
    def _tracing(self, trace: Trace) -> Iterator[None]:
        before, self._trace = self._trace, trace
        try:
            yield
        finally:
            self._trace = before

    def _watched(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            trace = self._trace
            if trace is None:
                return forward(*args, **kwargs)
            if trace.replay is None:
                output = forward(*args, **kwargs)
                chosen = chosen_experts(output)
            else:
                with _Replaced(trace.replay[:, layer].long(), self.num_experts) as pick:
                    output = forward(*args, **kwargs)
                chosen = pick.own
            trace.note(layer, chosen, output[0])
            return output

        return watched


def traced(
    routing: Routing | None, replay: Integer[Tensor, "N L K"] | None = None, *, keep_logits: bool = False
) -> AbstractContextManager[Trace | None]:
    """`Routing.traced`, or nothing for a model without routers."""
    return nullcontext() if routing is None else routing.traced(replay, keep_logits=keep_logits)


def chosen_experts(output: Any) -> Int[Tensor, "N K"]:
    """The indices among a router's outputs (logits, weights, indices); UnknownRouterError where they are not that."""
    found = [part for part in output if isinstance(part, Tensor) and not part.is_floating_point()]
    if not isinstance(output, tuple) or len(found) != 1 or output[0].dim() != 2 or found[0].dim() != 2:
        raise UnknownRouterError("it does not return (logits, weights, indices)")
    return found[0]


class _Replaced(TorchFunctionMode):
    """Within a router's forward: the last top-k, K of E experts a token, picks the given ones."""

    def __init__(self, experts: Int[Tensor, "N K"], num_experts: int) -> None:
        super().__init__()
        self.experts, self._num_experts = experts, num_experts
        self._own: Tensor | None = None

    @property
    def own(self) -> Int[Tensor, "N K"]:
        """What the router would have picked."""
        if self._own is None:
            raise UnknownRouterError("it does not pick its experts by topk")
        return self._own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return found
        scores = args[0] if args else kwargs["input"]
        # A router that first picks groups of experts does so over tensors of other shapes.
        if found.indices.shape != self.experts.shape or scores.shape[-1] != self._num_experts:
            return found
        self._own = found.indices
        return torch.return_types.topk((scores.gather(-1, self.experts), self.experts))
