"""The policy: a causal language model, its tokenizer, and how its hidden states become logits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.errors import UserError
from gspo.model.architecture import load_config, max_positions, short, unloadable
from gspo.model.head import Head
from gspo.model.packing import Pack
from gspo.model.prove import disagreement, probe_ids
from gspo.model.routers import find_routing
from gspo.model.routing import Routing
from gspo.model.tokenizer import fit_tokenizer, load_tokenizer, named_stop_ids
from gspo.model.trunk import Pass, enable_packing, packed_pass, padded_pass
from gspo.recipe.sections import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A causal language model without dropout, on its device, with its tokenizer and stop tokens."""

    model: Any  # a transformers causal LM
    tokenizer: Any
    device: torch.device
    stop_ids: tuple[int, ...]
    pad_id: int
    trunk: Any  # the module that maps token ids to hidden states
    head: Head  # maps hidden states to logits
    supports_packing: bool  # the trunk's attention understands packs
    routing: Routing | None  # None: the model has no experts, or routers that cannot be replayed
    unknown_routers: str | None  # why the model's routers cannot be replayed

    @property
    def max_positions(self) -> int | None:
        """The longest sequence (prompt and response) that the architecture declares, in tokens."""
        return max_positions(self.model.config)

    @property
    def num_parameters(self) -> int:
        """The number of trainable numbers; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def shared_hidden_size(self) -> int | None:
        """The hidden size, by which `pack` decides whether a group shares its prompt; None where it never does."""
        return self.head.weight.shape[1] if self.supports_packing else None

    def logits(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, "M V"]:
        """The model's logits, in float32, of its last hidden states."""
        return self.head.logits(hidden)

    def run(self, layout: Pack, *, keep_router_logits: bool = False) -> Pass:
        """Run the tokens of a pack through the trunk; routers replay the experts that the pack carries."""
        if self.supports_packing:
            return packed_pass(self.trunk, layout, self.routing, keep_logits=keep_router_logits)
        return padded_pass(self.trunk, layout, self.routing, keep_logits=keep_router_logits)

    def weights(self) -> dict[str, Tensor]:
        """A copy on the CPU of all tensors that the model saves, by name; tied tensors stay tied."""
        tensors = self.model.state_dict()
        places = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()}
        names = {place: name for name, place in places.items()}
        copies = {place: tensors[name].to("cpu", copy=True) for place, name in names.items()}
        return {name: copies[place] for name, place in places.items()}

    def save(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights (by default the present ones) and the tokenizer, for transformers' Auto classes to load."""
        self.model.save_pretrained(directory, state_dict=None if weights is None else dict(weights))
        self.tokenizer.save_pretrained(directory)


def make_tokenizer(recipe: ModelConfig, texts: Iterable[str]) -> Any:
    """The recipe's tokenizer; `texts` are read only if it is to be fitted."""
    if recipe.tokenizer == "fit":
        if recipe.path is not None:
            raise UserError("model.tokenizer: fit is for a new model (model.architecture); model.path brings its own")
        return fit_tokenizer(texts)
    return load_tokenizer(recipe.tokenizer or str(recipe.path), trust_remote_code=recipe.trust_remote_code)


def load_policy(
    recipe: ModelConfig, tokenizer: Any, *, seed: int, stop_tokens: Sequence[str] = (), weights: Path | None = None
) -> Policy:
    """Load (model.path) or initialise (model.architecture) the policy; UserError where that is impossible.

    `weights` is a directory that `Policy.save` wrote; its weights replace those of the recipe.
    """
    device = _device(recipe.device)
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = automatic if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    torch.manual_seed(seed)
    config = load_config(recipe)
    if recipe.architecture is not None:
        _set_token_ids(config, recipe.architecture, tokenizer)
    if path := weights or recipe.path:
        trust, safe = recipe.trust_remote_code, True if weights else None
        model = _pretrained(str(path), config, dtype=dtype, trust_remote_code=trust, use_safetensors=safe)
    else:
        model = _untrained(config, dtype)
    model = model.to(device).eval()
    check_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0], where=recipe.path or "model.architecture")
    stop_ids = _stop_ids(model, tokenizer, stop_tokens)
    model.generation_config.eos_token_id = list(stop_ids)  # the saved model must end where it was trained to end
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    trunk, head = _trunk_of(model), _head_of(model)
    _check_head(model, trunk, head)
    supports_packing = enable_packing(model, trunk, head.weight.shape[1])
    routing, unknown_routers = find_routing(model, trunk)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        device=device,
        stop_ids=stop_ids,
        pad_id=pad_id,
        trunk=trunk,
        head=head,
        supports_packing=supports_packing,
        routing=routing,
        unknown_routers=unknown_routers,
    )


def check_vocabulary(tokenizer: Any, num_embeddings: int, *, where: str) -> None:
    """UserError where the tokenizer has ids that the model has no embedding for."""
    if len(tokenizer) > num_embeddings:
        problem = f"the tokenizer has {len(tokenizer)} tokens, the model's embedding only {num_embeddings}"
        raise UserError(problem, where=where, fix="use the tokenizer that belongs to the model (model.tokenizer)")


def checkpoint_gradients(policy: Policy) -> None:
    """Keep no activations within layers for the backward pass: recompute them (actor.gradient_checkpointing)."""
    # transformers recomputes only in training mode; there is no dropout for that mode to switch on.
    options: dict[str, Any] = {"use_reentrant": False}
    if policy.routing is not None:
        options["context_fn"] = policy.routing.checkpoint_contexts
    enable = getattr(policy.model, "activation_checkpointing_enable", None)  # the newer name
    try:
        (enable or policy.model.gradient_checkpointing_enable)(options)
    except ValueError as error:
        raise UserError(str(error), where="actor.gradient_checkpointing") from None
    policy.model.train()


def _trunk_of(model: Any) -> Any:
    trunk = model.base_model
    return getattr(model, "model", model) if trunk is model else trunk


def _head_of(model: Any) -> Head:
    config, linear = model.config.get_text_config(), model.get_output_embeddings()
    if not isinstance(linear, torch.nn.Linear):
        name = type(linear).__name__
        raise UserError(f"{type(model).__name__} has no linear output layer but {name}", where="model.path")
    divisor = getattr(config, "logits_scaling", None)
    scale = getattr(config, "logit_scale", None) if divisor is None else 1 / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(weight=linear.weight, bias=linear.bias, scale=1.0 if scale is None else scale, cap=cap)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"model.device: {name} cannot be used here: {str(error).partition(chr(10))[0]}") from None


def _pretrained(path: str, config: Any, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(path, config=config, output_loading_info=True, **options)
    except Exception as error:
        raise unloadable(path, error) from None
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"{len(missing)} weights are missing, among them {missing[0]}", where=path)
    if unused := _unused(report["unexpected_keys"], model, config):
        problem = f"{len(unused)} weights of the files have no place in the model that config.json describes, such as "
        fix = "correct config.json (the number of layers, the model_type), or remove these weights from the files"
        raise UserError(f"{problem}{', '.join(unused[:3])}", where=path, fix=fix)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"weight {name} holds NaN or infinity", where=path, fix="use a copy that is whole")
        # A loaded weight lies in the file's pages, wherever its header ends, and kernels round by alignment.
        parameter.data = parameter.data.clone()
    return model


def _unused(names: Iterable[str], model: Any, config: Any) -> list[str]:
    """The weights that the model has no place for, without the other parts of a checkpoint of text and images."""
    if config.get_text_config() is config:
        return sorted(names)
    parts = {model.base_model_prefix, *(name.partition(".")[0] for name in model.state_dict())}
    return sorted(name for name in names if name.partition(".")[0] in parts)


def _set_token_ids(config: Any, architecture: Mapping[str, Any], tokenizer: Any) -> None:
    """Give a new model the tokenizer's vocabulary size and special tokens, unless its architecture names others."""
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    for name, value in {**ids, "bos_token_id": None}.items():
        setattr(config, name, architecture.get(name, value))


def _untrained(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        for parameter in model.parameters():  # not buffers: rotary frequencies stay float32, as in a loaded model
            parameter.data = parameter.data.to(dtype)
        model(input_ids=torch.ones(1, 2, dtype=torch.long))  # numbers that do not fit raise only here
    except Exception as error:
        raise UserError(f"no model can be made: {short(error)}", where="model.architecture") from None
    return model


def _stop_ids(model: Any, tokenizer: Any, stop_tokens: Sequence[str]) -> tuple[int, ...]:
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    declared = declared if isinstance(declared, list) else [declared]
    ids = [index for index in (*declared, tokenizer.eos_token_id) if index is not None]
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    for index in ids:
        if not isinstance(index, int) or not 0 <= index < num_embeddings:
            fix = "correct it in generation_config.json or config.json"
            raise UserError(f"eos_token_id {index!r} is no token of the model's", where="model.path", fix=fix)
    stop_ids = (*ids, *named_stop_ids(tokenizer, stop_tokens))
    if not stop_ids:
        problem = "neither the model nor its tokenizer names an end token: no response could ever end"
        raise UserError(problem, where="model.path", fix="name one with rollout.stop_tokens")
    return tuple(sorted(set(stop_ids)))


def _check_head(model: Any, trunk: Any, head: Head) -> None:
    """Prove that the head's logits of the trunk's hidden states are those that the model itself computes."""
    ids = probe_ids(trunk)[None]
    reason = disagreement(
        lambda: model(input_ids=ids, use_cache=False).logits[0].to(head.weight.dtype),
        lambda: head.logits(trunk(input_ids=ids, use_cache=False).last_hidden_state[0]),
    )
    if reason is not None:
        problem = f"{type(model).__name__} transforms its logits in a way gspo does not know: {reason}"
        raise UserError(problem, where="model.path", fix="add what it does to Head.logits in gspo/model/head.py")
