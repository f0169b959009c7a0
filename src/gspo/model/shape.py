"""The sizes of a model's layers that time and memory go by, from its text configuration."""

from typing import Any


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
