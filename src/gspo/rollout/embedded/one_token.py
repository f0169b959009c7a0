"""One more token a row through the usual decoder, without what transformers does around every operator.

A step of decoding with a small model, or on a GPU, is mostly overhead: masks, cache bookkeeping, module calls, norms of
seven operators. The decoder that most families share (Llama's, with or without norms of query and key) is written out
here; `decoder_of` knows it by its modules, and proves on a few tokens that this file computes the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gspo.model.prove import disagreement, probe_ids
from gspo.rollout.embedded.cache import in_place_cache, is_in_place

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_proven: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class _Norm:
    weight: Tensor
    eps: float
    module: Any

    def __call__(self, states: Tensor) -> Tensor:
        if states.dtype != torch.float32:  # the module rounds between its operators, and so must this
            normed: Tensor = self.module(states)
            return normed
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps) * self.weight


@dataclass(frozen=True, kw_only=True)
class _Layer:
    before_attention: _Norm
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    head_dim: int
    scaling: float
    before_mlp: _Norm
    mlp: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A trunk's modules, laid out for one token at a time."""

    embed: Any
    rotary: Any
    layers: tuple[_Layer, ...]
    norm: _Norm

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states."""
        dtype: torch.dtype = self.embed.weight.dtype
        return dtype

    def step(
        self, token: Int[Tensor, "R"], position: Int[Tensor, "R 1"], cache: Any, mask: Float[Tensor, "R 1 1 T"] | None
    ) -> Float[Tensor, "R H"]:
        """The last hidden state after one more token a row, whose keys and values are added to the cache.

        `mask` is added to the attention scores.
        """
        hidden = self.embed(token)
        cos, sin = (table.transpose(0, 1)[0, :, None] for table in self.rotary(hidden[:, None], position))
        for layer, cached in zip(self.layers, cache.layers, strict=True):
            hidden = hidden + _attend(layer, layer.before_attention(hidden), cos, sin, cached, mask)
            hidden = hidden + layer.mlp(layer.before_mlp(hidden))
        return self.norm(hidden)


def _attend(layer: _Layer, states: Tensor, cos: Tensor, sin: Tensor, cached: Any, mask: Tensor | None) -> Tensor:
    heads = (len(states), -1, layer.head_dim)
    query, key = _linear(layer.query, states).view(heads), _linear(layer.key, states).view(heads)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = layer.query_norm(query), layer.key_norm(key)
    query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
    keys, values = cached.update(key[:, :, None], _linear(layer.value, states).view(heads)[:, :, None])
    # Query heads that share a key head stand side by side: they are its rows, [R, key heads, group, dim].
    grouped = query.view(len(states), keys.shape[1], -1, layer.head_dim)
    seen = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=layer.scaling)
    return _linear(layer.output, seen.reshape(len(states), -1))


def _linear(module: nn.Linear, states: Tensor) -> Tensor:
    return F.linear(states, module.weight, module.bias)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def decoder_of(trunk: Any) -> Decoder | None:
    """The trunk's decoder where it is the usual one and proven to be; None: it is left to its own modules."""
    try:
        decoder = Decoder(
            embed=trunk.embed_tokens,
            rotary=trunk.rotary_emb,
            layers=tuple(_layer(layer) for layer in trunk.layers),
            norm=_norm(trunk.norm),
        )
        if trunk not in _proven:
            _proven[trunk] = _is_right(trunk, decoder)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # built, or called, in another way
        return None
    return decoder if _proven[trunk] else None


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    names = {name for name, _ in attention.named_children()}
    if {name for name, _ in layer.named_children()} != _LAYER or names - {"q_norm", "k_norm"} != set(_PROJECTIONS):
        raise TypeError(type(layer).__name__)
    query, key, value, output = (_plain_linear(getattr(attention, name)) for name in _PROJECTIONS)
    return _Layer(
        before_attention=_norm(layer.input_layernorm),
        query=query,
        key=key,
        value=value,
        output=output,
        query_norm=_norm(attention.q_norm) if "q_norm" in names else None,
        key_norm=_norm(attention.k_norm) if "k_norm" in names else None,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        before_mlp=_norm(layer.post_attention_layernorm),
        mlp=_mlp(mlp),
    )


def _mlp(module: Any) -> Callable[[Tensor], Tensor]:
    if {name for name, _ in module.named_children()} != _MLP:
        return lambda states: module(states[:, None])[:, 0]  # experts
    gate, up, down = (_plain_linear(getattr(module, name)) for name in ("gate_proj", "up_proj", "down_proj"))
    return lambda states: _linear(down, module.act_fn(_linear(gate, states)) * _linear(up, states))


def _plain_linear(module: Any) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise TypeError(type(module).__name__)
    return module


def _norm(module: Any) -> _Norm:
    return _Norm(weight=module.weight, eps=module.variance_epsilon, module=module)


def _is_right(trunk: Any, decoder: Decoder) -> bool:
    """Whether two tokens after a short prompt have the trunk's own hidden states."""
    ids = probe_ids(trunk).view(2, 4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], device=ids.device)  # one row padded on the left
    position = (mask.cumsum(-1) - 1).clamp(min=0)

    def plain() -> Tensor:
        output = trunk(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False)
        states: Tensor = output.last_hidden_state[:, 2:]
        return states

    def token_by_token() -> Tensor:
        cache = in_place_cache(trunk.config, most=ids.shape[1])
        if not is_in_place(cache):
            raise TypeError("a layer keeps only a part of the past")
        prompt = {"input_ids": ids[:, :2], "attention_mask": mask[:, :2], "position_ids": position[:, :2]}
        trunk(**prompt, past_key_values=cache, use_cache=True)
        masks = [additive(mask[:, : column + 1] == 1, decoder.dtype) for column in (2, 3)]
        steps = zip((2, 3), masks, strict=True)
        return torch.stack([decoder.step(ids[:, c], position[:, c : c + 1], cache, m) for c, m in steps], dim=1)

    return disagreement(plain, token_by_token) is None


def additive(mask: Bool[Tensor, "R T"], dtype: torch.dtype) -> Float[Tensor, "R 1 1 T"]:
    """0 where a token is real, -inf where it is padding."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[:, None, None]
