"""The surrogates against the paper's equations, written with plain loops in float64, by value and by gradient."""

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gspo.objective import Surrogate, surrogate

LEVELS = ("sequence", "sequence_token", "token")
CLIP_LOW, CLIP_HIGH = 0.03, 0.04  # for the noise below, clips on both sides at both levels


@dataclass
class Data:
    """Random packed sequences, in float64."""

    logprobs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    token_advantages: torch.Tensor
    lengths: list[int]

    def leaf(self) -> torch.Tensor:
        return self.logprobs.clone().requires_grad_()

    def rows(self) -> list[range]:
        """The packed positions of each sequence."""
        ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
        return [range(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]


def random_data(seed: int, *, num_sequences: int = 40) -> Data:
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    lengths = [1, *(rng.randint(1, 9) for _ in range(num_sequences - 1))]

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    old = -3 * normal(sum(lengths)).abs()
    return Data(
        logprobs=old + 0.08 * normal(sum(lengths)),
        old=old,
        advantages=normal(num_sequences),
        token_advantages=normal(sum(lengths)),
        lengths=lengths,
    )


def clip(ratio: torch.Tensor) -> torch.Tensor:
    if ratio < 1 - CLIP_LOW:
        return torch.tensor(1 - CLIP_LOW, dtype=torch.float64)
    if ratio > 1 + CLIP_HIGH:
        return torch.tensor(1 + CLIP_HIGH, dtype=torch.float64)
    return ratio


def minimum(ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    free, bounded = ratio * advantage, clip(ratio) * advantage
    return free if free <= bounded else bounded


def grpo_by_loops(logprobs: torch.Tensor, data: Data) -> list[torch.Tensor]:
    """Eq. 2-3, the term under 1/G Σ_i."""
    result = []
    for advantage, row in zip(data.advantages.tolist(), data.rows(), strict=True):
        total = torch.zeros((), dtype=torch.float64)
        for t in row:
            total = total + minimum((logprobs[t] - data.old[t]).exp(), advantage)
        result.append(total / len(row))
    return result


def geometric_mean_ratio(logprobs: torch.Tensor, old: torch.Tensor, row: Sequence[int]) -> torch.Tensor:
    """Eq. 8."""
    total = torch.zeros((), dtype=torch.float64)
    for t in row:
        total = total + logprobs[t] - old[t]
    return (total / len(row)).exp()


def gspo_by_loops(logprobs: torch.Tensor, data: Data) -> list[torch.Tensor]:
    """Eq. 6, the term under 1/G Σ_i."""
    return [
        minimum(geometric_mean_ratio(logprobs, data.old, row), advantage)
        for advantage, row in zip(data.advantages.tolist(), data.rows(), strict=True)
    ]


def gspo_token_by_loops(logprobs: torch.Tensor, data: Data, token_advantages: Sequence[float]) -> list[torch.Tensor]:
    """Eq. 14-15, the term under 1/G Σ_i."""
    result = []
    for row in data.rows():
        s = geometric_mean_ratio(logprobs, data.old, row).item()
        total = torch.zeros((), dtype=torch.float64)
        for t in row:
            ratio = s * logprobs[t].exp() / logprobs[t].exp().item()
            total = total + minimum(ratio, token_advantages[t])
        result.append(total / len(row))
    return result


def repeated(data: Data) -> list[float]:
    """Each sequence's advantage, once a token."""
    return [a for a, n in zip(data.advantages.tolist(), data.lengths, strict=True) for _ in range(n)]


def by_loops(level: str, logprobs: torch.Tensor, data: Data) -> list[torch.Tensor]:
    if level == "sequence":
        return gspo_by_loops(logprobs, data)
    if level == "token":
        return grpo_by_loops(logprobs, data)
    return gspo_token_by_loops(logprobs, data, repeated(data))


def computed(level: Any, logprobs: torch.Tensor, data: Data, advantages: torch.Tensor | None = None) -> Surrogate:
    dtype = logprobs.dtype
    return surrogate(
        logprobs,
        data.old.to(dtype),
        (data.advantages if advantages is None else advantages).to(dtype),
        torch.tensor(data.lengths),
        level=level,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
    )


def gradient(per_sequence: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(per_sequence.sum(), leaf)[0]


def value_and_gradient(level: str, data: Data) -> tuple[torch.Tensor, torch.Tensor, Surrogate]:
    leaf = data.leaf()
    result = computed(level, leaf, data)
    return result.per_sequence.detach(), gradient(result.per_sequence, leaf), result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", LEVELS)
def test_value_and_gradient_are_those_of_the_equations(level: str, seed: int) -> None:
    data = random_data(seed)
    leaf = data.leaf()
    expected = torch.stack(by_loops(level, leaf, data))
    expected_gradient = gradient(expected, leaf)
    value, found_gradient, _ = value_and_gradient(level, data)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found_gradient, expected_gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("level", LEVELS)
def test_the_random_data_is_clipped_on_both_sides_and_also_left_free_beyond_them(level: str) -> None:
    data = random_data(0)
    kinds = set()
    for advantage, row in zip(data.advantages.tolist(), data.rows(), strict=True):
        for t in row:
            members = [t] if level == "token" else row
            ratio = geometric_mean_ratio(data.logprobs, data.old, members)
            kinds.add((advantage > 0, "low" if ratio < 1 - CLIP_LOW else "high" if ratio > 1 + CLIP_HIGH else "inside"))
    assert kinds == {(sign, where) for sign in (True, False) for where in ("low", "inside", "high")}


@pytest.mark.parametrize("level", LEVELS)
def test_float32_agrees_with_float64(level: str) -> None:
    data = random_data(1)
    value, wanted, _ = value_and_gradient(level, data)
    leaf = data.logprobs.float().requires_grad_()
    result = computed(level, leaf, data)
    torch.testing.assert_close(result.per_sequence.detach(), value.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(result.per_sequence, leaf), wanted.float(), rtol=1e-5, atol=1e-6)


def test_gspo_gradient_weighs_all_tokens_of_a_response_alike_equation_11() -> None:
    data = random_data(2)
    _, found, result = value_and_gradient("sequence", data)
    for advantage, row in zip(data.advantages.tolist(), data.rows(), strict=True):
        s = math.exp(sum((data.logprobs[t] - data.old[t]).item() for t in row) / len(row))
        clipped = (advantage > 0 and s > 1 + CLIP_HIGH) or (advantage < 0 and s < 1 - CLIP_LOW)
        weight = 0.0 if clipped else s * advantage / len(row)
        assert found[list(row)].tolist() == pytest.approx([weight] * len(row), rel=1e-12)
        assert result.clipped[list(row)].tolist() == [clipped] * len(row)


def test_grpo_gradient_weighs_each_token_by_its_own_ratio_equation_12() -> None:
    data = random_data(2)
    _, found, result = value_and_gradient("token", data)
    for advantage, row in zip(data.advantages.tolist(), data.rows(), strict=True):
        for t in row:
            w = math.exp((data.logprobs[t] - data.old[t]).item())
            clipped = (advantage > 0 and w > 1 + CLIP_HIGH) or (advantage < 0 and w < 1 - CLIP_LOW)
            assert found[t].item() == pytest.approx(0.0 if clipped else w * advantage / len(row), rel=1e-12)
            assert result.clipped[t].item() == clipped


@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_with_one_advantage_a_sequence_is_gspo_equation_18(seed: int) -> None:
    data = random_data(seed)
    value, slope, gspo = value_and_gradient("sequence", data)
    token_value, token_slope, gspo_token = value_and_gradient("sequence_token", data)
    torch.testing.assert_close(token_value, value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(token_slope, slope, rtol=1e-12, atol=1e-14)
    assert torch.equal(gspo_token.clipped, gspo.clipped)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_takes_an_advantage_of_its_own_for_every_token(seed: int) -> None:
    data = random_data(seed)
    leaf = data.leaf()
    expected = torch.stack(gspo_token_by_loops(leaf, data, data.token_advantages.tolist()))
    wanted = gradient(expected, leaf)
    # Under the shape check, too: this is how a caller with turn-level credit calls it.
    result = computed("sequence_token", leaf, data, data.token_advantages)
    torch.testing.assert_close(result.per_sequence.detach(), expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(result.per_sequence, leaf), wanted, rtol=1e-12, atol=1e-14)
    assert torch.equal(result.clipped, wanted == 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", LEVELS)
def test_clipped_names_exactly_the_tokens_without_gradient(level: str, seed: int) -> None:
    _, slope, result = value_and_gradient(level, random_data(seed))
    assert torch.equal(result.clipped, slope == 0)
    assert 0 < result.clipped.sum() < len(result.clipped)


@pytest.mark.parametrize("level", LEVELS)
def test_a_ratio_beyond_the_range_on_the_harmless_side_keeps_its_gradient(level: str) -> None:
    # Â > 0 with a small ratio, Â < 0 with a large one: the minimum is the unclipped side (its pessimism).
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    result = surrogate(
        logprobs,
        torch.tensor([-0.5, -1.5], dtype=torch.float64),
        torch.tensor([1.0, -1.0], dtype=torch.float64),
        torch.tensor([1, 1]),
        level=level,
        clip_low=0.1,
        clip_high=0.1,
    )
    assert result.per_sequence.tolist() == pytest.approx([math.exp(-0.5), -math.exp(0.5)])
    assert gradient(result.per_sequence, logprobs).tolist() == pytest.approx([math.exp(-0.5), -math.exp(0.5)])
    assert not result.clipped.any()


def test_the_reported_sequence_ratio_is_equation_8_at_every_level() -> None:
    data = random_data(3)
    expected = [geometric_mean_ratio(data.logprobs, data.old, row).item() for row in data.rows()]
    for level in LEVELS:
        result = computed(level, data.leaf(), data)
        assert result.sequence_ratio.tolist() == pytest.approx(expected, rel=1e-12)
        assert not result.sequence_ratio.requires_grad


def test_fresh_weights_give_ratio_one_no_clipping_and_one_gradient_at_all_levels() -> None:
    data = random_data(4)
    data.logprobs = data.old.clone()
    gradients = []
    for level in LEVELS:
        value, slope, result = value_and_gradient(level, data)
        assert result.sequence_ratio.tolist() == [1.0] * len(data.lengths)
        assert not result.clipped.any()
        torch.testing.assert_close(value, data.advantages, rtol=1e-14, atol=0)
        gradients.append(slope)
    expected = [a / n for a, n in zip(data.advantages.tolist(), data.lengths, strict=True) for _ in range(n)]
    for slope in gradients:
        assert slope.tolist() == pytest.approx(expected, rel=1e-12)


def test_responses_of_any_length_weigh_the_same() -> None:
    # Eq. 6 has one term a sequence: repeating every token of a response changes no value.
    data = random_data(5, num_sequences=6)
    long = Data(
        logprobs=data.logprobs.repeat_interleave(3),
        old=data.old.repeat_interleave(3),
        advantages=data.advantages,
        token_advantages=data.token_advantages.repeat_interleave(3),
        lengths=[3 * n for n in data.lengths],
    )
    for level in LEVELS:
        value, _, _ = value_and_gradient(level, data)
        repeated_value, _, _ = value_and_gradient(level, long)
        torch.testing.assert_close(repeated_value, value, rtol=1e-12, atol=1e-14)


def test_sequences_do_not_touch_each_other() -> None:
    data = random_data(6, num_sequences=5)
    for level in LEVELS:
        before, _, _ = value_and_gradient(level, data)
        changed = random_data(6, num_sequences=5)
        changed.logprobs[list(data.rows()[2])] += 0.02
        after, _, _ = value_and_gradient(level, changed)
        same = before == after
        assert same.tolist() == [True, True, False, True, True]


@pytest.mark.parametrize(
    ("level", "num_logprobs", "num_old", "num_advantages"),
    [
        ("sequence", 5, 5, 2),
        ("sequence", 6, 5, 2),
        ("sequence", 6, 6, 3),
        ("sequence", 6, 6, 1),
        ("sequence", 6, 6, 6),
        ("token", 6, 6, 5),
        ("sequence_token", 6, 6, 5),
        ("sequence_token", 6, 6, 1),
    ],
)
def test_shapes_that_do_not_fit_are_refused(level: str, num_logprobs: int, num_old: int, num_advantages: int) -> None:
    unchecked = inspect.unwrap(surrogate)  # the shape checks of the test run would speak first
    lengths = torch.tensor([2, 4])
    with pytest.raises(ValueError, match=r"tokens|advantages"):
        unchecked(torch.zeros(num_logprobs), torch.zeros(num_old), torch.ones(num_advantages), lengths, level=level)


def test_padded_tensors_and_lengths_that_are_no_integers_are_refused_with_what_to_pass() -> None:
    unchecked, padded, advantages = inspect.unwrap(surrogate), torch.zeros(2, 3), torch.ones(2)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]) == 1
    with pytest.raises(ValueError, match=r"logprobs\[mask\], lengths = mask\.sum\(1\)"):
        unchecked(padded, padded, advantages, mask.sum(1))
    with pytest.raises(ValueError, match=r"lengths\.long\(\), or mask\.bool\(\)\.sum\(1\)"):
        unchecked(padded[mask], padded[mask], advantages, mask.float().sum(1))
    assert unchecked(padded[mask], padded[mask], advantages, mask.sum(1)).per_sequence.tolist() == [1.0, 1.0]


def test_an_advantage_for_each_of_several_one_token_responses_is_read_the_same_either_way() -> None:
    data = random_data(7, num_sequences=3)
    data = Data(data.logprobs[:3], data.old[:3], data.advantages, data.advantages, [1, 1, 1])
    value, slope, _ = value_and_gradient("sequence", data)
    token_value, token_slope, _ = value_and_gradient("sequence_token", data)
    torch.testing.assert_close(token_value, value)
    torch.testing.assert_close(token_slope, slope)


def test_the_defaults_are_the_papers_clip_range() -> None:
    old = torch.zeros(4, dtype=torch.float64)
    ratios = torch.tensor([1 + 3.9e-4, 1 + 4.1e-4, 1 - 2.9e-4, 1 - 3.1e-4], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    result = surrogate(ratios.log(), old, advantages, torch.tensor([1, 1, 1, 1]))
    assert result.clipped.tolist() == [False, True, False, True]
    values = [1 + 3.9e-4, 1 + 4e-4, -(1 - 2.9e-4), -(1 - 3e-4)]
    assert result.per_sequence.tolist() == pytest.approx(values, rel=1e-12)
