"""The routers of a mixture-of-experts model: the experts of each token, recorded and replayed (2507.18071, §5.3)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class UnknownRouterError(Exception):
    """A router does not choose its experts in the way that `Routing` can replace; the text says why."""


class Trace:
    """What L routers did with the N tokens of one forward pass."""

    def __init__(self, routing: "Routing", replay: Integer[Tensor, "N L K"] | None, *, keep_logits: bool) -> None:
        self.replay = replay  # the experts to be used in place of the routers' choice
        self.keep_logits = keep_logits
        self._routing = routing
        self._chosen: dict[int, Tensor] = {}  # by layer, as the logits
        self._logits: dict[int, Tensor] = {}

    def note(self, layer: int, chosen: Int[Tensor, "N K"], logits: Float[Tensor, "N E"]) -> None:
        """Record the experts that a router chose, or would have chosen if nothing were replayed, in its order."""
        self._chosen[layer] = chosen
        if self.keep_logits:
            self._logits[layer] = logits.float().log() if self._routing.gives_probabilities else logits

    @property
    def experts(self) -> Integer[Tensor, "N L K"]:
        """The routers' choice, in the smallest integers that hold it."""
        layers = range(self._routing.num_layers)
        return torch.stack([self._chosen[layer] for layer in layers], dim=1).to(self._routing.dtype)

    @property
    def logits(self) -> list[Float[Tensor, "N E"]]:
        """The routers' logits with their gradients, layer by layer; none unless they are kept."""
        return [self._logits[layer] for layer in sorted(self._logits)]


class Routing:
    """The L routers of a model, each of which chooses K of E experts a token; all are watched from here on.

    A router is a module that returns its logits and the indices of its experts, and picks those by `torch.topk`. A
    replay replaces the pick alone. Everything else of the router runs as its model has it, so that the weights of the
    replayed experts come from the live logits, with their gradients. A deep copy of the model would call the routers
    that are watched here: load a second model instead.
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

    def traced(
        self, replay: Integer[Tensor, "N L K"] | None = None, *, keep_logits: bool = False
    ) -> AbstractContextManager[Trace]:
        """Record one forward pass within, its experts replaced by `replay` where that is given."""
        return self._tracing(Trace(self, replay, keep_logits=keep_logits))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The context_fn of torch.utils.checkpoint: the recomputation replays the experts that the pass replayed."""
        if self._trace is None:
            return nullcontext(), nullcontext()
        return nullcontext(), self.traced(self._trace.replay)

    @contextmanager
    def _tracing(self, trace: Trace) -> Iterator[Trace]:
        before, self._trace = self._trace, trace
        try:
            yield trace
        finally:
            self._trace = before

    def _watched(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            trace = self._trace
            if trace is None:
                return forward(*args, **kwargs)
            replay = None if trace.replay is None else trace.replay[:, layer].long()
            with nullcontext() if replay is None else _ReplacedTopK(replay, self.num_experts) as pick:
                output = forward(*args, **kwargs)
            trace.note(layer, chosen_experts(output) if pick is None else pick.original(), output[0])
            return output

        return watched


def traced(
    routing: Routing | None, replay: Integer[Tensor, "N L K"] | None = None, *, keep_logits: bool = False
) -> AbstractContextManager[Trace | None]:
    """`Routing.traced`, or nothing for a model without routers."""
    return nullcontext() if routing is None else routing.traced(replay, keep_logits=keep_logits)


def chosen_experts(output: Any) -> Int[Tensor, "N K"]:
    """The indices in a router's output (logits, weights, indices); UnknownRouterError for another kind of output."""
    indices = [part for part in output if isinstance(part, Tensor) and not part.is_floating_point()]
    if not isinstance(output, tuple) or len(indices) != 1 or output[0].dim() != 2 or indices[0].dim() != 2:
        raise UnknownRouterError("it does not return (logits, weights, indices)")
    return indices[0]


class _ReplacedTopK(TorchFunctionMode):
    """Within a router's forward: the last top-k of K of E experts a token picks the given experts."""

    def __init__(self, experts: Int[Tensor, "N K"], num_experts: int) -> None:
        super().__init__()
        self._experts, self._num_experts = experts, num_experts
        self._original: Tensor | None = None

    def original(self) -> Int[Tensor, "N K"]:
        """The experts that the router would have picked."""
        if self._original is None:
            raise UnknownRouterError("it does not pick its experts by topk")
        return self._original

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return result
        scores = args[0] if args else kwargs["input"]
        # A router that first picks groups of experts does so over tensors of other shapes.
        if result.indices.shape != self._experts.shape or scores.shape[-1] != self._num_experts:
            return result
        self._original = result.indices
        return torch.return_types.topk((scores.gather(-1, self._experts), self._experts))
