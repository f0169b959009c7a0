"""Attention over a pack against softmax(q k / √d) v in float64, sequence by sequence."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gspo.model import trunk
from gspo.model.packing import Pack, TokenSequence, pack, take
from gspo.model.trunk import packed_attention

HEADS, WIDTH = 4, 8


class Layer(nn.Module):
    """What the attention function reads of a layer."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.num_key_value_groups = HEADS // key_heads
        self.is_causal = True
        self.layer_idx = 0
        self.config: Any = None


def layout_of(monkeypatch: pytest.MonkeyPatch) -> Pack:
    """Two groups that share prompts (of 7 and 3 tokens), sequences alone; rows of unequal and of equal lengths."""

    def decided(sequences: Any, members: Any, hidden_size: int | None) -> bool:
        return len(members) > 1

    monkeypatch.setattr("gspo.model.packing._shares", decided)
    found = []
    for prompt, lengths in (((1,) * 7, (1, 6, 3)), ((2,), (5,)), ((3,) * 3, (4, 4)), ((4,) * 6, (2,))):
        found += [TokenSequence(prompt_ids=prompt, response_ids=torch.arange(n)) for n in lengths]
    return pack(found, device=torch.device("cpu"), hidden_size=WIDTH)


def plain_attention(states: list[torch.Tensor], window: int | None, scaling: float) -> torch.Tensor:
    """Causal attention of one sequence [n, h, d], key heads repeated."""
    query, key, value = states
    key, value = (s.repeat_interleave(HEADS // s.shape[1], dim=1) for s in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * scaling
    for i, j in product(range(len(query)), repeat=2):
        if j > i or (window is not None and i - j >= window):
            scores[:, i, j] = -torch.inf
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), value)


def expected_of(layout: Pack, states: list[torch.Tensor], window: int | None, scaling: float) -> torch.Tensor:
    """Every row with its prefix before it, alone; a prefix by itself."""
    parts = []
    for block in layout.blocks:
        prefix = range(block.start, block.start + block.prefix)
        if block.prefix:
            parts.append(plain_attention([s[list(prefix)] for s in states], window, scaling))
        start = block.rows.start
        for length in block.lengths:
            whole = [*prefix, *range(start, start + length)]
            parts.append(plain_attention([s[whole] for s in states], window, scaling)[block.prefix :])
            start += length
    return torch.cat(parts)


@pytest.mark.parametrize("scaling", [WIDTH**-0.5, 0.9])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 7, 8, 100])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_value_and_gradient_are_those_of_each_sequence_alone(
    key_heads: int, window: int | None, scaling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(monkeypatch)
    number, generator = len(layout.ids), torch.Generator().manual_seed(0)
    states = [torch.randn(number, h, WIDTH, generator=generator) for h in (HEADS, key_heads, key_heads)]
    upstream = torch.randn(number, HEADS, WIDTH, generator=generator)
    exact = [s.double().requires_grad_() for s in states]
    expected = expected_of(layout, exact, window, scaling)
    (expected * upstream).sum().backward()
    found = [s.clone().requires_grad_() for s in states]
    rows = [s.transpose(0, 1)[None] for s in found]
    output, _ = packed_attention(
        Layer(key_heads),
        rows[0],
        rows[1],
        rows[2],
        None,
        layout=layout,
        scaling=scaling,
        dropout=0.0,
        sliding_window=window,
    )
    torch.testing.assert_close(output[0].double(), expected.detach(), rtol=1e-5, atol=1e-5)
    (output[0] * upstream).sum().backward()
    mine, theirs = (torch.cat([s.grad.flatten() for s in side if s.grad is not None]) for side in (found, exact))
    assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_a_layer_that_slides_must_say_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, layer = layout_of(monkeypatch), Layer(1)
    query, key, value = (torch.randn(1, h, len(layout.ids), WIDTH) for h in (HEADS, 1, 1))
    layer.config = SimpleNamespace(layer_types=["sliding_attention"])
    with pytest.raises(NotImplementedError, match="sliding window"):
        packed_attention(layer, query, key, value, None, layout=layout)
    packed_attention(layer, query, key, value, None, layout=layout, sliding_window=4)
    layer.config.layer_types = ["full_attention"]
    packed_attention(layer, query, key, value, None, layout=layout)


def test_without_a_pack_it_is_the_plain_attention_under_its_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, HEADS, 2, WIDTH, generator=generator)  # two tokens after four in a cache
    key, value = (torch.randn(3, 2, 6, WIDTH, generator=generator) for _ in range(2))
    mask = torch.ones(2, 6, dtype=torch.bool).tril(4)[None, None]
    output, _ = packed_attention(Layer(2), query, key, value, mask, scaling=0.5)
    for row in range(3):
        before = torch.zeros(4, HEADS, WIDTH, dtype=torch.float64)
        states = [torch.cat([before, query[row].transpose(0, 1).double()])]
        states += [s[row].transpose(0, 1).double() for s in (key, value)]
        torch.testing.assert_close(output[row].double(), plain_attention(states, None, 0.5)[4:], rtol=1e-5, atol=1e-5)


def test_a_mask_made_before_training_can_be_used_in_it() -> None:
    trunk._masks.clear()
    with torch.no_grad():
        mask = trunk._mask(3, 2, None, torch.zeros(1))
    assert mask is not None and not mask.is_inference()
    assert mask[0, 0].tolist() == [[0, 0, 0, -torch.inf, -torch.inf], [0] * 4 + [-torch.inf], [0] * 5]


def test_masks_are_kept_up_to_a_number_of_bytes_and_the_last_one_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk, "MAX_MASK_BYTES", 3 * 4 * 10 * 15)
    trunk._masks.clear()
    like = torch.zeros(1)
    masks = [trunk._mask(10, 5, window, like) for window in (2, 3, 4)]
    assert trunk._mask(10, 5, 2, like) is masks[0] and len(trunk._masks) == 3
    trunk._mask(10, 5, 5, like)  # the one that was asked for longest ago goes
    assert trunk._mask(10, 5, 2, like) is masks[0] and trunk._mask(10, 5, 3, like) is not masks[1]
    large = trunk._mask(100, 5, None, like)
    assert trunk._mask(100, 5, None, like) is large and len(trunk._masks) == 1


def test_taking_rows_has_the_gradient_of_indexing() -> None:
    index = torch.tensor([4, 0, 3, 6])
    for shape in ((7,), (7, 3), (7, 2, 3)):
        first = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
        second = first.detach().clone().requires_grad_()
        upstream = torch.randn(4, *shape[1:], generator=torch.Generator().manual_seed(0))
        found, expected = take(first, index), second[index]
        assert torch.equal(found, expected)
        (found * upstream).sum().backward()
        (expected * upstream).sum().backward()
        assert first.grad is not None and second.grad is not None
        assert torch.equal(first.grad, second.grad)
