"""The sizes of a model's layers that time and memory go by, from its text configuration."""

from typing import Any

from torch import nn


def heads_of(text: Any) -> tuple[int, int, int]:
    """The heads of queries, those of keys, and a head's size."""
    heads = getattr(text, "num_attention_heads", None) or 1
    keys = getattr(text, "num_key_value_heads", None) or heads
    return heads, keys, getattr(text, "head_dim", None) or text.hidden_size // heads


def inner_size(text: Any) -> int:
    """The width within a layer's MLP; of a mixture that of a token's experts together, and of those that all share."""
    inner: int = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if experts := getattr(text, "num_experts_per_tok", None):
        inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
        inner += getattr(text, "shared_expert_intermediate_size", None) or 0
    return inner


def active_parameters(model: nn.Module, text: Any) -> tuple[int, int]:
    """The parameters of which a token's products are made, and those in experts; without experts all, and 0."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    in_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    number = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    chosen = min(1.0, (getattr(text, "num_experts_per_tok", None) or number) / number)
    return round(sum(sizes.values()) - in_experts * (1 - chosen)), in_experts
