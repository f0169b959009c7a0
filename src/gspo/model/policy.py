"""The policy: a causal language model, its tokenizer and head, and the likelihoods that it gives to responses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.errors import UserError
from gspo.model.freed_memory import keep_freed_memory
from gspo.model.head import Head, token_likelihood, token_squared_errors
from gspo.model.linear import use_onednn
from gspo.model.load import check_vocabulary, find_stop_ids, load_config, load_model, max_positions
from gspo.model.lora import adapter_of, add_lora, has_adapter, quantization, save_adapter, with_adapter
from gspo.model.neighbours import check_padding
from gspo.model.packing import EMPTY, Pack, TokenSequence, join_experts, pack, take
from gspo.model.parameters import freeze, layers_of, trunk_of, whole
from gspo.model.prove import check_noiseless, disagreement, one_line, probe_ids, trunk_states
from gspo.model.routing import Routing, find_routing
from gspo.model.sharding import NO_PACKS, Sharding, gathered, not_shardable, ready_to_try
from gspo.model.trunk import Pass, enable_packing, packed_pass, padded_pass
from gspo.recipe.sections import ModelConfig
from gspo.types import Experts


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A causal language model without dropout (it has no training mode), on its device, with tokenizer and stop tokens.

    Example: policy.head.logits(policy.trunk(input_ids=ids).last_hidden_state[0]) are the model's logits, [N, V].
    """

    model: Any  # a transformers causal LM
    tokenizer: Any
    device: torch.device
    stop_ids: tuple[int, ...]
    trunk: Any  # the module that maps token ids to hidden states
    proven_head: Head  # maps hidden states to logits, with the weights of when it was proven
    supports_packing: bool  # the trunk's attention understands packs
    routing: Routing | None  # None: the model has no experts, or routers that cannot be replayed
    unknown_routers: str | None  # why the model's routers cannot be replayed

    adapter: Mapping[str, Tensor] | None = None  # in place of the model's own: of a policy that shares its model
    sharding: Sharding | None = None  # how the model is spread over ranks
    # Where rank 0 acts alone: has the others take part (`take_part`) in what it does next with a model that they share.
    call_others: Callable[[str | None], None] | None = None

    @property
    def head(self) -> Head:
        """The head with the model's present weights: a sharded model has others in a pass than between passes."""
        linear = self.model.get_output_embeddings()
        return replace(self.proven_head, weight=linear.weight, bias=linear.bias)

    @property
    def architecture(self) -> str:
        """The name of the model's class in transformers."""
        return type(self.model).__name__.removeprefix("FSDP")  # which makes a class of its own

    @property
    def dtype(self) -> torch.dtype:
        """Return what the model computes in."""
        dtype: torch.dtype = self.sharding.dtype if self.sharding else self.model.get_output_embeddings().weight.dtype
        return dtype

    @property
    def is_sharded(self) -> bool:
        """Tell whether the model is spread over ranks."""
        return self.sharding is not None

    @property
    def max_positions(self) -> int | None:
        """The longest sequence (prompt and response) that the architecture declares, in tokens."""
        return max_positions(self.model.config)

    @property
    def num_parameters(self) -> int:
        """The number of numbers in the weights; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def shared_hidden_size(self) -> int | None:
        """The hidden size, by which `pack` decides whether a group shares its prompt; None where it never does."""
        return self.head.weight.shape[1] if self.supports_packing else None

    def run(self, layout: Pack, *, keep_router_logits: bool = False) -> Pass:
        """Run the tokens of a pack through the trunk; routers replay the experts that the pack carries."""
        run = packed_pass if self.supports_packing else padded_pass
        return run(self.trunk, layout, self.routing, keep_logits=keep_router_logits)

    def forward(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return what `compute` makes of trunk and head: within the model's own forward pass where it is sharded."""
        if self.adapter is not None:
            with with_adapter(self.model, self.adapter):
                return replace(self, adapter=None).forward(compute)
        if not self.is_sharded:
            return compute()
        if self.call_others is not None:
            self.call_others(None)
        outputs: tuple[Any, ...] = self.model.compute(compute)
        # A gradient that is asked of a copy does not set off the model's own backward pass.
        return tuple(
            output.clone() if isinstance(output, Tensor) and output.requires_grad else output for output in outputs
        )

    @contextmanager
    def gathered(self, layer: str) -> Iterator[None]:
        """Have the tensors of a layer whole, or those outside of layers, where ranks share the model."""
        if not self.is_sharded:
            yield
            return
        if self.call_others is not None:
            self.call_others(layer)
        with gathered(self.model, layer):
            yield

    def take_part(self, layer: str | None) -> None:
        """Take part, on another rank, where rank 0 gathers a layer or makes a forward pass without gradients."""
        if layer is not None:
            with self.gathered(layer):
                return
        with torch.no_grad():
            response_likelihood(self, [EMPTY])

    def weights(self, *, is_first: bool = True) -> dict[str, Tensor]:
        """A copy on the CPU of all tensors that the model saves, by name; tied tensors stay tied. Of LoRA: the adapter.

        Of a sharded model every rank has to call it, and the first gets them: they are gathered one after the other.
        """
        if has_adapter(self.model):
            own = self.adapter or adapter_of(self.model)
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.items() if is_first}
        tensors = self.model.state_dict()
        owners = {name: id(parameter) for name, parameter in self.model.named_parameters(remove_duplicate=False)}
        places = {name: owners.get(name, name) for name in tensors}
        names = {place: name for name, place in places.items()}
        copies: dict[int | str, Tensor] = {}
        for place, name in names.items():
            dtype = self.sharding.dtype if self.sharding and place in owners.values() else None
            tensor = whole(tensors[name] if dtype is None else tensors[name].to(dtype))
            if is_first:
                copies[place] = tensor.to("cpu", copy=True)
        return {name: copies[place] for name, place in places.items() if copies}

    @torch.no_grad()
    def take_weights(self, other: "Policy") -> None:
        """Take over the present weights of a policy of the same model."""
        if self.adapter is None:
            self.model.load_state_dict(other.model.state_dict())
            return
        for name, parameter in adapter_of(other.model).items():
            self.adapter[name].copy_(parameter)

    def save(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights (by default the present ones) and the tokenizer, for transformers' Auto classes to load."""
        if has_adapter(self.model):
            save_adapter(self.model, directory, weights)
        else:
            self.model.save_pretrained(directory, state_dict=None if weights is None else dict(weights))
        self.tokenizer.save_pretrained(directory)


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """The policy's likelihoods of N packed response tokens, and the states that they come from.

    Example: for responses of 2 and 3 tokens, logprobs = [-0.1, -2.3, -0.7, -0.2, -1.6], in nats.
    """

    logprobs: Float[Tensor, "N"]  # in nats, of each response token
    entropy: Float[Tensor, "N"]  # in nats, of the distribution that each token was drawn from
    hidden: Float[Tensor, "N H"]  # the state that predicts each token
    experts: tuple[Experts, ...] | None  # of each sequence, the routers' choice; None: no routers can be watched
    router_logits: tuple[Float[Tensor, "N E"], ...]  # layer by layer, if the caller asked for them

    def at(self, rows: Int[Tensor, "M"]) -> "Likelihood":
        """Return those of some tokens alone; experts stay those of whole sequences."""
        packed: dict[str, Any] = {name: take(getattr(self, name), rows) for name in ("logprobs", "entropy", "hidden")}
        return replace(self, **packed, router_logits=tuple(take(logits, rows) for logits in self.router_logits))


def response_likelihood(
    policy: Policy, sequences: Sequence[TokenSequence], *, temperature: float = 1.0, keep_router_logits: bool = False
) -> Likelihood:
    """Log-likelihood and entropy of every scored response token under softmax(logits / temperature), in float32.

    One forward pass over the packed sequences; the caller bounds their number (`micro_batches`).
    """
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    targets = torch.cat([sequence.scored_ids for sequence in sequences]).to(policy.device, non_blocking=True)

    def compute() -> tuple[Any, ...]:
        output = policy.run(layout, keep_router_logits=keep_router_logits)
        hidden = take(output.hidden, layout.predictors)
        logprobs, entropy = token_likelihood(policy.head, hidden, targets, temperature)
        logits = [take(logits, layout.predictors) for logits in output.router_logits]
        return logprobs, entropy, hidden, output.experts, *logits

    logprobs, entropy, hidden, experts, *router_logits = policy.forward(compute)
    return Likelihood(
        logprobs=logprobs,
        entropy=entropy,
        hidden=hidden,
        experts=None if experts is None else _by_sequence(experts.cpu(), layout, sequences),
        router_logits=tuple(router_logits),
    )


def response_states(policy: Policy, sequences: Sequence[TokenSequence]) -> Float[Tensor, "N H"]:
    """The trunk's states that predict the N packed, scored response tokens, from one forward pass."""
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    (hidden,) = policy.forward(lambda: (take(policy.run(layout).hidden, layout.predictors),))
    return hidden


def squared_errors(policy: Policy, sequences: Sequence[TokenSequence], temperature: float) -> Float[Tensor, "N"]:
    """|1[y] - π|² of every scored response token, the squared length of its gradient by the logits (no gradient)."""
    layout = pack(sequences, device=policy.device, hidden_size=policy.shared_hidden_size)
    targets = torch.cat([sequence.scored_ids for sequence in sequences]).to(policy.device, non_blocking=True)

    def compute() -> tuple[Any, ...]:
        hidden = take(policy.run(layout).hidden, layout.predictors)
        return (token_squared_errors(policy.head, hidden, targets, temperature),)

    (errors,) = policy.forward(compute)
    return errors


def _by_sequence(
    experts: Integer[Tensor, "N L K"], layout: Pack, sequences: Sequence[TokenSequence]
) -> tuple[Experts, ...]:
    """The experts of each sequence, copied so that the pack can be freed; a shared prefix is copied once."""
    prefixes = {span: experts[slice(*span)].clone() for span in {(span.start, span.stop) for span in layout.prefixes}}
    spans = zip(layout.prefixes, layout.rows, strict=True)
    parts = [Experts(prefix=prefixes[span.start, span.stop], row=experts[row].clone()) for span, row in spans]
    joined = zip(layout.parts, sequences, strict=True)
    return tuple(join_experts([parts[i] for i in own], is_own=each.starts[:1] == (0,)) for own, each in joined)


def try_save(model: Any, tokenizer: Any, *, where: str) -> None:
    """Raise UserError where what lies beside weights cannot be saved: steps up to the first save would be lost."""
    with TemporaryDirectory() as directory:
        try:
            model.save_pretrained(directory, state_dict={})
            tokenizer.save_pretrained(directory)
        except Exception as error:  # whatever a configuration, a tokenizer or code of their own may raise
            problem = f"this model and its tokenizer cannot be saved: {one_line(error)}"
            raise UserError(
                problem,
                where=where,
                fix="mend the file that this is about, or make room for it in the directory of temporary files",
            ) from None


def load_policy(
    recipe: ModelConfig,
    tokenizer: Any,
    *,
    seed: int,
    stop_tokens: Sequence[str] = (),
    weights: Path | None = None,
    sharding: Sharding | None = None,
) -> Policy:
    """Load (model.path) or initialise (model.architecture) the policy; UserError where that is impossible.

    `weights` is a directory that `Policy.save` wrote; its weights replace those of the recipe. With `sharding` all
    ranks have to call it.
    """
    if (device := device_of(recipe.device)).type == "cpu":
        keep_freed_memory()
    torch.manual_seed(seed)
    config = load_config(recipe)
    if recipe.architecture is not None:  # a new model has the tokenizer's tokens, unless its architecture names others
        special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        for name, value in {"vocab_size": len(tokenizer), **special}.items():
            setattr(config, name, recipe.architecture.get(name, value))
    dtype = torch.float32 if sharding else dtype_of(recipe)  # what ranks share are float32 masters
    options = quantization(recipe.lora, device, dtype, is_sharded=sharding is not None)
    weights = weights if recipe.lora is None else None  # an adapter's own are loaded by `load_models`
    read = partial(load_model, recipe, config, weights=weights, dtype=dtype, sharding=sharding, quantization=options)
    model = (sharding.on_all(read) if sharding else read()).to(device).eval()
    use_onednn(model)
    # Dropout, jitter and skipped layers would make π_θ ≠ π_old before any update: the first ratio would not be 1.
    model.train = MethodType(lambda model, mode=True: model, model)
    if recipe.lora is None:
        freeze(model, recipe.frozen)
    else:  # now, for FSDP2 keeps what it sees when it first gathers them
        model.requires_grad_(False)
    check_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0], where=recipe.path or "model.architecture")
    stop_ids, trunk = _declared_stop_ids(model, tokenizer, stop_tokens), trunk_of(model)
    with ready_to_try(model, sharding):
        check_noiseless(model, partial(trunk_states, trunk))
        head = _proven_head(model, trunk)
        supports_packing = enable_packing(model, trunk, head.weight.shape[1])
        routing, unknown_routers = find_routing(model, trunk)
        if not supports_packing and not sharding:
            check_padding(model, trunk)
    if recipe.lora is not None:
        torch.manual_seed(seed)
        add_lora(model, recipe.lora, base=str(recipe.path), is_sharded=sharding is not None)
    if sharding and not supports_packing:  # ranks would run the trunk in different numbers
        raise not_shardable(model, NO_PACKS)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        device=device,
        stop_ids=stop_ids,
        trunk=trunk,
        proven_head=head,
        supports_packing=supports_packing,
        routing=routing,
        unknown_routers=unknown_routers,
        sharding=sharding,
    )


def _declared_stop_ids(model: Any, tokenizer: Any, stop_tokens: Sequence[str]) -> tuple[int, ...]:
    """The tokens that end a response, which the model declares from now on: it must end where it was trained to end."""
    generation, num_embeddings = model.generation_config, model.get_input_embeddings().weight.shape[0]
    stop_ids = find_stop_ids(getattr(generation, "eos_token_id", None), tokenizer, stop_tokens, num_embeddings)
    generation.eos_token_id = list(stop_ids)
    generation._original_object_hash = hash(generation)  # transformers saves as it was only what nobody has changed
    return stop_ids


def checkpoint_gradients(policy: Policy) -> None:
    """Keep no activations within layers for the backward pass: recompute them (actor.gradient_checkpointing)."""
    # transformers would do so in training mode only, in which it also drops out, skips layers and jitters routers.
    layers = [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layers = layers or list(layers_of(policy.model) or ())  # of a model that brings code of its own
    if not layers or not policy.model.supports_gradient_checkpointing:
        problem = f"{policy.architecture} has no layers that can be computed again"
        raise UserError(problem, where="actor.gradient_checkpointing", fix="set it to false")
    contexts = {} if policy.routing is None else {"context_fn": policy.routing.checkpoint_contexts}
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward, contexts)
    check_noiseless(policy.model, lambda: policy.forward(lambda: (trunk_states(policy.trunk),))[0])


def _recomputed(forward: Callable[..., Any], contexts: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **contexts)


def _proven_head(model: Any, trunk: Any) -> Head:
    """The head whose logits of the trunk's hidden states are proven to be those that the model itself computes."""
    config, linear = model.config.get_text_config(), model.get_output_embeddings()
    if not isinstance(linear, torch.nn.Linear):
        name = type(linear).__name__
        raise UserError(f"{type(model).__name__} has no linear output layer but {name}", where="model.path")
    divisor = getattr(config, "logits_scaling", None)
    scale = getattr(config, "logit_scale", None) if divisor is None else 1 / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    head = Head(weight=linear.weight, bias=linear.bias, scale=1.0 if scale is None else scale, cap=cap)
    ids = probe_ids(trunk)[None]
    reason = disagreement(
        lambda: model(input_ids=ids, use_cache=False).logits[0].to(head.weight.dtype),
        lambda: head.logits(trunk(input_ids=ids, use_cache=False).last_hidden_state[0]),
    )
    if reason is not None:
        problem = f"{type(model).__name__} transforms its logits in a way gspo does not know: {reason}"
        raise UserError(problem, where="model.path", fix="add what it does to Head.logits in gspo/model/head.py")
    return head


def dtype_of(recipe: ModelConfig) -> torch.dtype:
    """Return what the model computes in."""
    automatic = torch.bfloat16 if device_of(recipe.device).type == "cuda" else torch.float32
    named: torch.dtype = automatic if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    return named


def device_of(name: str) -> torch.device:
    """The device of `model.device`; UserError where this machine has none of that name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        what = f"{name} cannot be used here: {str(error).partition(chr(10))[0]}"
        raise UserError(what, where="model.device", fix="model.device: auto takes what there is") from None
