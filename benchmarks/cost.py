"""The cost model: floating-point operations and bytes that decoding and updating cannot do without."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a dense decoder that its cost depends on."""

    layers: int
    hidden: int
    attention: int  # query heads x head dimension
    key_value: int  # key heads x head dimension
    matrices: int  # weights of one layer's linear maps
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """From a transformers config of the Qwen3 kind."""
        attention = config.num_attention_heads * config.head_dim
        key_value = config.num_key_value_heads * config.head_dim
        matrices = config.hidden_size * (2 * attention + 2 * key_value + 3 * config.intermediate_size)
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            attention=attention,
            key_value=key_value,
            matrices=matrices,
            vocabulary=config.vocab_size,
        )

    def trunk_flops(self, tokens: int, pairs: int) -> int:
        """One forward pass over tokens that attend to `pairs` (query, key) pairs in all; 2 a multiply-add."""
        return self.layers * (2 * self.matrices * tokens + 4 * self.attention * pairs)

    def head_flops(self, tokens: int) -> int:
        """Logits of that many tokens."""
        return 2 * self.hidden * self.vocabulary * tokens


def update_flops(shape: Shape, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> int:
    """Forward and backward (twice the forward) of groups whose prompt is read once; nothing is computed twice."""
    total = 0
    for prompt, group in zip(prompts, responses, strict=True):
        pairs = prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in group)
        total += 3 * (shape.trunk_flops(prompt + sum(group), pairs) + shape.head_flops(sum(group)))
    return total


def decode_flops(shape: Shape, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> int:
    """Prefill once a group, then a token at a time."""
    total = 0
    for prompt, group in zip(prompts, responses, strict=True):
        pairs = prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in group)
        total += shape.trunk_flops(prompt + sum(group), pairs) + shape.head_flops(sum(group))
    return total


def decode_bytes(shape: Shape, prompts: Sequence[int], responses: Sequence[Sequence[int]], *, width: int) -> int:
    """Read in decoding: the weights once a step, each row's keys and values at every token; `width` bytes a number."""
    steps = max(max(group) for group in responses)
    weights = shape.layers * shape.matrices + shape.hidden * shape.vocabulary
    held = sum(n * prompt + n * (n + 1) // 2 for prompt, group in zip(prompts, responses, strict=True) for n in group)
    return width * (steps * weights + 2 * shape.layers * shape.key_value * held)
