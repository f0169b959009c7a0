"""A token more for each row through the usual decoder, without what transformers does around every operator.

A step of decoding with a small model, or on a GPU, is mostly overhead: masks, cache bookkeeping, module calls, norms of
seven operators. The decoder that most families share (Llama's, with or without norms of query and key) is written out
here; `fast_decoder` knows it by its modules, and proof.py proves that this file computes the same.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gspo.engine.embedded.cache import in_place_cache, is_in_place
from gspo.model.linear import linear
from gspo.model.lora import parts_of
from gspo.model.prove import MISFITS
from gspo.model.trunk import NAME as PACKED

Operator = Callable[[Tensor], Tensor]
# The last hidden states [R H] after one more token a row, of (its id [R], its position [R 1], the cache, which takes in
# its keys and values, and a mask [R T], True where a column is a token; None: everywhere).
Decoder = Callable[[Tensor, Tensor, Any, Tensor | None], Tensor]

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def read_tokens(
    trunk: Any,
    ids: Int[Tensor, "R t"],
    mask: Bool[Tensor, "R T"] | None,
    position: Int[Tensor, "R t"],
    cache: Any,
) -> Float[Tensor, "R t H"]:
    """The last hidden states of tokens that follow those in the cache, by the trunk's own modules."""
    states: Tensor = trunk(
        input_ids=ids,
        attention_mask=None if mask is None else mask.long(),
        position_ids=position,
        use_cache=True,
        **{_cache_name(trunk): cache},
    ).last_hidden_state
    return states


def _cache_name(trunk: Any) -> str:
    """Return what a trunk calls its keys and values: transformers has another name for them since 5.24."""
    return "cache" if "cache" in inspect.signature(trunk.forward).parameters else "past_key_values"


def fast_decoder(trunk: Any) -> Decoder | None:
    """The trunk's decoder where it is built like the usual one; None: it is left to its own modules."""
    if trunk.config._attn_implementation not in ("sdpa", PACKED):  # whose attention is written out here
        return None
    try:
        return _decoder(trunk) if is_in_place(in_place_cache(trunk.config, most=1)) else None
    except MISFITS:
        return None


def _decoder(trunk: Any) -> Decoder:
    embed, rotary, norm = trunk.embed_tokens, trunk.rotary_emb, _norm(trunk.norm)
    layers = [(_attention(layer), _mlp(layer)) for layer in trunk.layers]

    def step(token: Tensor, position: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        hidden: Tensor = embed(token)
        added = None
        if mask is not None:  # 0 where a token is real, -inf where it is padding
            added = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, -torch.inf)[:, None, None]
        cos, sin = (table.transpose(0, 1)[0, :, None] for table in rotary(hidden[:, None], position))
        for (attend, mlp), cached in zip(layers, cache.layers, strict=True):
            hidden = hidden + attend(hidden, cos, sin, cached, added)
            hidden = hidden + mlp(hidden)
        return norm(hidden)

    return step


def _attention(layer: Any) -> Callable[[Tensor, Tensor, Tensor, Any, Tensor | None], Tensor]:
    module, before = layer.self_attn, _norm(layer.input_layernorm)
    names = {name for name, _ in module.named_children()}
    if {name for name, _ in layer.named_children()} != _LAYER or names - {"q_norm", "k_norm"} != set(_PROJECTIONS):
        raise TypeError(type(layer).__name__)
    to_query, to_key, to_value, output = (_linear(getattr(module, name)) for name in _PROJECTIONS)
    norms = (_norm(module.q_norm), _norm(module.k_norm)) if len(names) == 6 else None
    head_dim, scaling = module.head_dim, module.scaling

    def attend(hidden: Tensor, cos: Tensor, sin: Tensor, cached: Any, mask: Tensor | None) -> Tensor:
        states = before(hidden)
        heads = (len(states), -1, head_dim)
        query, key, value = to_query(states).view(heads), to_key(states).view(heads), to_value(states).view(heads)
        if norms is not None:
            query, key = norms[0](query), norms[1](key)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        keys, values = cached.update(key[:, :, None], value[:, :, None])
        # Query heads that share a key head stand side by side: they are its rows, [R, key heads, group, dim].
        grouped = query.view(len(states), keys.shape[1], -1, head_dim)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return output(attended.reshape(len(states), -1))

    return attend


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _mlp(layer: Any) -> Operator:
    module, before = layer.mlp, _norm(layer.post_attention_layernorm)
    if {name for name, _ in module.named_children()} != _MLP:
        return lambda hidden: module(before(hidden)[:, None])[:, 0]  # experts
    gate, up, down = (_linear(getattr(module, name)) for name in ("gate_proj", "up_proj", "down_proj"))

    def mlp(hidden: Tensor) -> Tensor:
        states = before(hidden)
        return down(module.act_fn(gate(states)) * up(states))

    return mlp


def _linear(module: Any) -> Operator:
    if type(module) is nn.Linear:
        return lambda states: linear(states, module.weight, module.bias, decodes=True)
    if (parts := parts_of(module)) is None:
        raise TypeError(type(module).__name__)
    base, down, up, factor = parts

    def adapted(states: Tensor) -> Tensor:
        added = linear(linear(states.to(down.weight.dtype), down.weight), up.weight) * factor
        return (linear(states, base.weight, base.bias, decodes=True) + added).to(states.dtype)

    return adapted


def _norm(module: Any) -> Operator:
    weight, eps = module.weight, module.variance_epsilon
    if weight.dtype != torch.float32:  # the module rounds between its operators, and so must this
        return module
    return lambda states: states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight
