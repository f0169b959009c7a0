"""Weights for an engine that is not the policy, and OPSM: by loops, and what a dropped token may still do (nothing)."""

import inspect
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gspo.objective import correction_weights, surrogate
from gspo.recipe.published import CORRECTIONS, PUBLISHED

METHODS = [method for method in CORRECTIONS if method not in ("none", "ignore")]
LEVELS = [(method, level) for method in METHODS for level in CORRECTIONS[method].levels]
NORMED = {"tokens_per_sequence": 6.0}
DECOUPLED_LOW, DECOUPLED_HIGH = 0.1, 0.12


class Data:
    """Packed sequences with π_θ, π_old and an engine that is now near, now far from it, in float64."""

    def __init__(self, seed: int, num_sequences: int = 40) -> None:
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        self.lengths = [1, *(rng.randint(1, 8) for _ in range(num_sequences - 1))]
        count, of_token = sum(self.lengths), torch.tensor(self.lengths)

        def normal(number: int = count) -> torch.Tensor:
            return torch.randn(number, generator=generator, dtype=torch.float64)

        self.old = -normal().abs() - 0.4
        self.logprobs = self.old + 0.15 * normal()
        self.engine = self.old + 0.9 * normal(num_sequences).repeat_interleave(of_token) + 0.5 * normal()
        self.advantages = normal(num_sequences)

    def rows(self) -> Iterator[range]:
        start = 0
        for length in self.lengths:
            yield range(start, start + length)
            start += length

    def weights(
        self, method: Any, low: float | None = None, high: float | None = None, level: Any = None
    ) -> torch.Tensor:
        return correction_weights(self.old, self.engine, torch.tensor(self.lengths), method, (low, high), level=level)

    def surrogate(self, name: Any, level: Any, x: torch.Tensor, **more: Any) -> Any:
        engine = self.engine if PUBLISHED[name].weighs_by_engine or "opsm_delta" in more else None
        lengths = torch.tensor(self.lengths)
        settings = {"name": name, "level": level, "sampler_logprobs": engine, **NORMED, **more}
        return surrogate(x, self.old.to(x.dtype), self.advantages.to(x.dtype), lengths, **settings)


def furthest(logp: float, logq: float) -> float:
    """The larger divergence of two coins, in either direction."""
    p, q = (min(max(math.exp(each), 1e-8), 1 - 1e-8) for each in (logp, logq))
    return max(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p)))


def by_loops(data: Data, method: str, level: str, low: float | None, high: float | None) -> list[float]:
    found = []
    for row in data.rows():
        ratios = [math.exp(data.old[t].item()) / math.exp(data.engine[t].item()) for t in row]
        geometric = math.prod(ratios) ** (1 / len(ratios))
        for t, own in zip(row, ratios, strict=True):
            rho = own if level == "token" else geometric
            inside = (low is None or rho >= low) and (high is None or rho <= high)
            if method in ("tis", "decoupled"):
                found.append(rho if high is None else min(rho, high))
            elif method == "kpop":
                is_near = high is None or furthest(data.old[t].item(), data.engine[t].item()) <= high
                found.append(rho if is_near else 0.0)
            elif method == "geometric_mask":
                found.append(1.0 if inside else 0.0)
            else:
                found.append(rho if inside else 0.0)
    return found


@pytest.mark.parametrize(("method", "level"), LEVELS)
@pytest.mark.parametrize("given", ["published", "narrow", "low", "high", "none"])
def test_weights_are_those_of_the_loops(method: Any, level: Any, given: str) -> None:
    data = Data(0)
    published = CORRECTIONS[method]
    low, high = (published.low, published.high) if given == "published" else (0.8, 1.25)
    low, high = (None if given in ("high", "none") else low), (None if given in ("low", "none") else high)
    found = data.weights(method, low, high, level)
    assert found.tolist() == pytest.approx(by_loops(data, method, level, low, high), rel=1e-12)
    if given == "narrow":  # it binds, and not everywhere
        kinds = {weight == 0 or weight == high for weight in found.tolist()}
        assert kinds == ({False} if method == "decoupled" and high is None else {False, True})


@pytest.mark.parametrize("method", METHODS)
def test_weights_carry_no_gradient(method: Any) -> None:
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = correction_weights(old, torch.tensor([-1.1, -2.3]), torch.tensor([2]), method, (0.5, 2.0))
    assert not weights.requires_grad


@pytest.mark.parametrize("length", [1, 10, 10_000])
@pytest.mark.parametrize("method", [method for method, level in LEVELS if level == "sequence"])
def test_a_sequences_weight_is_its_tokens_mean_and_does_not_run_away_with_its_length(method: Any, length: int) -> None:
    engine = torch.full((length,), -1.0, dtype=torch.float64)  # 0.4 % less likely to the policy, token for token
    low, high = CORRECTIONS[method].low, CORRECTIONS[method].high
    found = correction_weights(engine - 0.004, engine, torch.tensor([length]), method, (low, high), level="sequence")
    rho = 1.0 if method == "geometric_mask" else math.exp(-0.004)
    assert found.tolist() == pytest.approx([rho] * length, rel=1e-9)


@pytest.mark.parametrize("method", ["tis", "mis", "icepop", "decoupled"])
def test_as_published_a_weight_is_of_the_tokens_own_ratio(method: Any) -> None:
    old, engine = torch.tensor([-1.0, -2.0, -0.5, -0.7]), torch.tensor([-1.1, -4.0, -0.2, -0.7])
    bounds = CORRECTIONS[method].low, CORRECTIONS[method].high
    wanted = {"tis": [math.exp(0.1), 2.0, math.exp(-0.3), 1.0], "mis": [math.exp(0.1), 0.0, math.exp(-0.3), 1.0]}
    free = [math.exp(0.1), math.exp(2.0), math.exp(-0.3), 1.0]
    expected = {**wanted, "decoupled": free, "icepop": [free[0], 0.0, *free[2:]]}[method]
    found = correction_weights(old, engine, torch.tensor([3, 1]), method, bounds)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_bounds_that_are_not_given_are_the_published_ones(method: Any) -> None:
    data, published = Data(7), CORRECTIONS[method]
    found = correction_weights(data.old, data.engine, torch.tensor(data.lengths), method)
    assert torch.equal(found, data.weights(method, published.low, published.high))
    assert torch.equal(found, data.weights(method)) == (method == "decoupled")  # None: no bound


def test_to_ignore_is_a_weight_of_one() -> None:
    assert (Data(7).weights("ignore") == 1).all()


def test_a_method_or_level_that_there_is_not_is_named() -> None:
    one, lengths = torch.zeros(2), torch.tensor([2])
    for method, level, match in (
        ("truncate", None, "unknown method 'truncate': tis, mis"),
        ("none", None, "unknown method 'none'"),
        ("icepop", "sequence", "icepop has no level 'sequence': token"),
        ("geometric_mask", "token", "geometric_mask has no level"),
        ("tis", "batch", "tis has no level 'batch': token or sequence"),
    ):
        with pytest.raises(ValueError, match=match):
            inspect.unwrap(correction_weights)(one, one, lengths, method, level=level)


def test_the_decoupled_form_is_the_papers() -> None:
    # 2110.00641, Eq. 10: (π_prox/π_behav) min(rÂ, clip(r)Â), r = π_θ/π_prox, of each step.
    data = Data(1)
    x = data.logprobs.clone().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for advantage, row in zip(data.advantages.tolist(), data.rows(), strict=True):
        for t in row:
            behaviour = math.exp(data.old[t].item() - data.engine[t].item())
            r = (x[t] - data.old[t]).exp()
            near = min(max(r.item(), 1 - DECOUPLED_LOW), 1 + DECOUPLED_HIGH)
            expected = expected + behaviour * min(r * advantage, near * advantage) / len(row)
    clip = {"clip_low": DECOUPLED_LOW, "clip_high": DECOUPLED_HIGH}
    found = data.surrogate("clip", "token", x, weights=data.weights("decoupled"), **clip)
    assert found.per_sequence.sum().item() == pytest.approx(expected.item(), rel=1e-12)
    slopes = [torch.autograd.grad(total, x)[0] for total in (found.per_sequence.sum(), expected)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-14)


CASES = [(name, level) for name, published in PUBLISHED.items() for level in published.levels]


@pytest.mark.parametrize("method", ["icepop", "mis"])
@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_weight_multiplies_its_tokens_term_and_a_weight_of_zero_takes_its_gradient(
    name: str, level: str, method: Any
) -> None:
    data = Data(2)
    x = data.logprobs.clone().requires_grad_()
    weights = data.weights(method, CORRECTIONS[method].low, CORRECTIONS[method].high, CORRECTIONS[method].levels[-1])
    result = data.surrogate(name, level, x, weights=weights)
    plain = data.surrogate(name, level, x)
    assert torch.equal(result.masked, weights == 0) and 0 < result.masked.sum() < len(weights)
    assert not (result.clipped & result.masked).any()
    slope = torch.autograd.grad(result.per_sequence.sum(), x)[0]
    assert (slope[result.masked] == 0).all()
    if method == "mis":  # one weight a sequence
        first = torch.tensor([row.start for row in data.rows()])
        torch.testing.assert_close(result.per_sequence, plain.per_sequence * weights[first], rtol=1e-12, atol=1e-14)
    elif level != "sequence" and name != "gmpo":  # where a token has a term of its own
        own = torch.autograd.grad(plain.per_sequence.sum(), x)[0]
        torch.testing.assert_close(slope, own * weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_dropped_sequence_has_no_gradient_even_where_its_ratio_is_infinite(
    name: str, level: str, dtype: torch.dtype
) -> None:
    data = Data(3)
    weights = torch.ones_like(data.old, dtype=dtype)
    dropped = [t for row in list(data.rows())[3:9:2] for t in row]
    weights[dropped] = 0
    far = data.logprobs.clone()
    far[dropped] += 1e4
    slopes = []
    for logprobs in (data.logprobs, far):
        x = logprobs.to(dtype).requires_grad_()
        result = data.surrogate(name, level, x, weights=weights)
        assert torch.isfinite(result.per_sequence).all()
        slopes.append(torch.autograd.grad(result.per_sequence.sum(), x)[0])
    assert (slopes[0][dropped] == 0).all() and slopes[0].count_nonzero() > 10
    assert torch.equal(*slopes)


@pytest.mark.parametrize("name", ["clip", "dapo", "sapo", "dppo", "cispo", "minirl", "reinforce"])
def test_a_dropped_token_has_no_gradient_even_where_its_ratio_is_infinite(name: str) -> None:
    data = Data(4)
    far, weights = data.logprobs.float(), torch.ones(len(data.old))
    far[5:40:7] += 1e4
    weights[5:40:7] = 0
    slopes = []
    for logprobs in (data.logprobs.float(), far):
        x = logprobs.clone().requires_grad_()
        slopes.append(torch.autograd.grad(data.surrogate(name, "token", x, weights=weights).per_sequence.sum(), x)[0])
    assert (slopes[0][5:40:7] == 0).all() and torch.equal(*slopes)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("name", ["clip", "dual_clip", "dapo", "luspo"])
def test_a_clipped_token_has_no_gradient_even_where_its_ratio_is_infinite(name: str, level: str) -> None:
    data = Data(6)
    data.advantages = data.advantages.abs()  # where the ratio counts no more than the range allows
    far = data.logprobs.float()
    far[::9] += 1e4
    x = far.requires_grad_()
    result = data.surrogate(name, level, x)
    assert torch.isfinite(result.per_sequence).all() and result.clipped[::9].all()
    slope = torch.autograd.grad(result.per_sequence.sum(), x)[0]
    assert torch.isfinite(slope).all() and torch.equal(slope == 0, result.clipped)
    assert 0 < result.clipped.sum() < len(slope)


TAKES_TOKENS = [(name, level, True) for name, level in CASES if level != "sequence" and name != "gmpo"]


@pytest.mark.parametrize("delta", [0.02, 0.05, None])
@pytest.mark.parametrize(("name", "level", "per_token"), [*((*case, False) for case in CASES), *TAKES_TOKENS])
def test_opsm_drops_whole_sequences_of_negative_advantage_that_have_become_unlikely(
    name: str, level: str, per_token: bool, delta: float | None
) -> None:
    data = Data(5)
    expected = []
    by_sequence = data.advantages.tolist()
    if per_token:
        data.advantages = torch.randn(len(data.old), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        by_sequence = [sum(data.advantages[t].item() for t in row) / len(row) for row in data.rows()]
    for advantage, row in zip(by_sequence, data.rows(), strict=True):
        away = sum((data.engine[t] - data.logprobs[t]).item() for t in row) / len(row)  # π_old is the engine's there
        expected += [delta is not None and advantage < 0 and away > delta] * len(row)
    x = data.logprobs.clone().requires_grad_()
    result, plain = (data.surrogate(name, level, x, opsm_delta=given) for given in (delta, None))
    assert result.masked.tolist() == expected and any(expected) == (delta is not None)
    first = torch.tensor([row.start for row in data.rows()])
    kept = (~torch.tensor(expected))[first]
    assert torch.equal(result.per_sequence, torch.where(kept, plain.per_sequence, 0.0))
    slopes = [torch.autograd.grad(one.per_sequence.sum(), x)[0] for one in (result, plain)]
    assert torch.equal(slopes[0], torch.where(torch.tensor(expected), 0.0, slopes[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kpop_drops_what_has_no_finite_weight_and_tokens_that_only_one_would_draw(dtype: torch.dtype) -> None:
    old = torch.tensor([0.0, -30.0, -torch.inf, 0.0, -20.0, -0.1], dtype=dtype)
    engine = torch.tensor([0.0, -900.0, -torch.inf, -20.0, 0.0, -0.2], dtype=dtype)
    weights = correction_weights(old, engine, torch.tensor([6]), "kpop")
    assert weights.tolist() == pytest.approx([1, 0, 0, 0, 0, math.exp(0.1)], rel=1e-6)
