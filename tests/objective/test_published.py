"""Every published surrogate, at every level it has, against its paper's equation in plain loops and float64."""

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gspo.objective import Surrogate, SurrogateSettings, surrogate
from gspo.recipe.published import ONLY, PUBLISHED

Scalar = Any  # a number, with or without a gradient
# Range and dual clip, such that the noise below lies on both sides of both bounds. DPPO is of probabilities.
BOUNDS = {"token": (0.1, 0.12, 1.25), "sequence": (0.03, 0.04, 1.08), "sequence_token": (0.03, 0.04, 1.08)}
DPPO = (0.03, 0.04, 1.25)
CAP = 1.1  # minirl's, such that it binds
SAPO = (0.8, 1.7)  # far enough apart to be told from each other
MEAN_TOKENS, LONGEST = 5.3, 17.0
SUMMED = ("luspo", "dppo", "minirl", "reinforce")
BY_ENGINE = ("dppo", "ipo", "minirl")
STOPS_GRADIENTS = {"clip", "ppo", "dual_clip", "dapo", "dr_grpo", "luspo", "gmpo", *BY_ENGINE}
CASES = [(name, level) for name, published in PUBLISHED.items() for level in published.levels]
PER_TOKEN = [case for case in CASES if case[1] != "sequence" and case[0] != "gmpo"]


@dataclass(frozen=True)
class Data:
    """Random packed sequences, in float64."""

    logprobs: torch.Tensor
    old: torch.Tensor
    engine: torch.Tensor
    advantages: torch.Tensor  # B
    token_advantages: torch.Tensor  # N
    lengths: list[int]

    def rows(self) -> list[range]:
        ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
        return [range(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def repeated(self) -> list[float]:
        return [a for a, n in zip(self.advantages.tolist(), self.lengths, strict=True) for _ in range(n)]


def random_data(seed: int, num_sequences: int = 60) -> Data:
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    lengths = [1, *(rng.randint(1, 9) for _ in range(num_sequences - 1))]

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    old = -normal(sum(lengths)).abs() - 0.4
    return Data(
        logprobs=old + 0.15 * normal(sum(lengths)),
        old=old,
        engine=old + 0.1 * normal(sum(lengths)),
        advantages=normal(num_sequences),
        token_advantages=normal(sum(lengths)),
        lengths=lengths,
    )


def bounds_of(name: str, level: str) -> tuple[float, float, float]:
    return DPPO if name in ("dppo", "ipo") else BOUNDS[level]


def clipped_to(ratio: Scalar, low: float, high: float) -> Scalar:
    return low if ratio < low else high if ratio > high else ratio


def ppo(r: Scalar, a: float, low: float, high: float) -> Scalar:
    """min(rÂ, clip(r, 1-ε, 1+ε)Â)."""
    return min(r * a, clipped_to(r, 1 - low, 1 + high) * a)


def paper_of_token(
    name: str, r: Scalar, logp: Scalar, logp_old: float, logp_engine: float, a: float, low: float, high: float, c: float
) -> Scalar:
    """What stands under the sum over tokens in the paper of `name` (or once, for a whole sequence's r and log π)."""
    if name == "dual_clip":  # 1912.09729, Eq. 5
        return max(ppo(r, a, low, high), c * a) if a < 0 else ppo(r, a, low, high)
    if name == "cispo":  # 2506.13585, Eq. 4-5
        return clipped_to(r.item(), 1 - low, 1 + high) * a * logp
    if name == "sapo":  # 2511.20347, Eq. 5-6
        tau = SAPO[0] if a > 0 else SAPO[1]
        return 1 / (1 + (-tau * (r - 1)).exp()) * 4 / tau * a
    if name == "dppo":  # 2602.04879, Eq. 12: from the sampler; M = 0 where its probability has gone too far, Â's way
        p, p_engine = math.exp(logp.item()), math.exp(logp_engine)
        far = abs(p - p_engine) > (high if a > 0 else low)
        r = (logp - logp_engine).exp()
        return 0 * r if far and ((a > 0 and p > p_engine) or (a < 0 and p < p_engine)) else r * a
    if name == "ipo":  # prime-rl: |π - μ| beyond the bound, whatever Â is
        moved = math.exp(logp.item()) - math.exp(logp_engine)
        return 0 * logp if moved > high or -moved > low else (logp - logp_engine).exp() * a
    if name == "minirl":  # 2512.01374, Eq. 7, and §4.2: the weight is truncated
        mask = 0 if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) else 1
        return mask * min(math.exp(logp.item() - logp_engine), CAP) * a * logp
    if name == "reinforce":
        return a * logp
    return ppo(r, a, low, high)


def geometric_mean(x: torch.Tensor, data: Data, row: Sequence[int]) -> torch.Tensor:
    product: Scalar = 1.0
    for t in row:
        product = product * (x[t].exp() / data.old[t].exp())
    return product ** (1 / len(row))


def gmpo(x: torch.Tensor, data: Data, row: Sequence[int], a: float, low: float, high: float) -> Scalar:
    """{Π_t min(ρ^sgn, clip(ρ, e^-ε, e^ε)^sgn)^sgn}^(1/|y|) Â (2507.20673, Eq. 4)."""
    product: Scalar = 1.0
    sgn = 1 if a > 0 else -1
    for t in row:
        r = x[t].exp() / data.old[t].exp()
        product = product * min(r**sgn, clipped_to(r, math.exp(-low), math.exp(high)) ** sgn) ** sgn
    return product ** (1 / len(row)) * a


def paper(
    name: str,
    level: str,
    x: torch.Tensor,
    data: Data,
    advantages: Sequence[float],  # N
    norm: str | None = None,
) -> list[Scalar]:
    """The term of each sequence under 1/G Σ_i."""
    low, high, c = bounds_of(name, level)
    found = []
    for row in data.rows():
        s, total = geometric_mean(x, data, row), torch.zeros((), dtype=torch.float64)
        for t in row:
            a, old, engine = advantages[t], data.old[t].item(), data.engine[t].item()
            if name == "gmpo":
                total = total + gmpo(x, data, row, a, low, high)
            elif level == "sequence":  # its one term, once for each of its tokens
                mean_logp = sum(x[u] for u in row) / len(row)
                total = total + paper_of_token(name, s, mean_logp, old, engine, a, low, high, c)
            else:
                r = x[t].exp() / data.old[t].exp()
                r = r if level == "token" else s.item() * x[t].exp() / x[t].exp().item()
                total = total + paper_of_token(name, r, x[t], old, engine, a, low, high, c)
        by_paper = {"dapo": "mean", "ipo": "mean", "cispo": "group", "dr_grpo": "constant"} | dict.fromkeys(
            SUMMED, "none"
        )
        divisors = {"own": len(row), "mean": MEAN_TOKENS, "group": MEAN_TOKENS, "constant": LONGEST, "none": 1}
        found.append(total / divisors[norm or by_paper.get(name, "own")])
    return found


def computed(name: Any, level: Any, x: torch.Tensor, data: Data, advantages: torch.Tensor, **more: Any) -> Surrogate:
    low, high, dual = bounds_of(name, level)
    divisor = LONGEST if "constant" in (more.get("length_norm"), PUBLISHED[name].length_norm) else MEAN_TOKENS
    return surrogate(
        x,
        data.old.to(x.dtype),
        advantages.to(x.dtype),
        torch.tensor(data.lengths),
        level=level,
        clip_low=low,
        clip_high=high,
        name=name,
        **{"tokens_per_sequence": divisor, "dual_clip": dual, "minirl_cap": CAP, "sapo_temperature": SAPO, **more},
        sampler_logprobs=data.engine.to(x.dtype) if name in BY_ENGINE else None,
    )


def slope_of(per_sequence: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weights = 0.5 + torch.arange(len(per_sequence), dtype=x.dtype)  # each sequence its own, to tell them apart
    return torch.autograd.grad((weights * per_sequence).sum(), x)[0]


def agree(name: str, level: str, data: Data, *, per_token: bool, norm: str | None = None) -> None:
    x = data.logprobs.clone().requires_grad_()
    given = data.token_advantages if per_token else data.advantages
    advantages = data.token_advantages.tolist() if per_token else data.repeated()
    expected = torch.stack(paper(name, level, x, data, advantages, norm))
    wanted = slope_of(expected, x)
    result = computed(name, level, x, data, given, **({"length_norm": norm} if norm else {}))
    torch.testing.assert_close(result.per_sequence, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(slope_of(result.per_sequence, x), wanted, rtol=1e-11, atol=1e-13)
    assert torch.equal(result.clipped, wanted == 0)
    assert not result.masked.any()
    if name in STOPS_GRADIENTS:  # and so on either side, or the data would prove little
        signs = torch.tensor(advantages)[result.clipped] > 0
        assert signs.any() and not signs.all() and not result.clipped.all()


@pytest.mark.parametrize(("name", "level"), CASES)
def test_value_gradient_and_clipping_are_those_of_the_paper(name: str, level: str) -> None:
    agree(name, level, random_data(0), per_token=False)


@pytest.mark.parametrize(("name", "level"), PER_TOKEN)
def test_an_advantage_a_token_stands_where_the_paper_has_it(name: str, level: str) -> None:
    agree(name, level, random_data(1), per_token=True)


@pytest.mark.parametrize("norm", ["own", "mean", "constant", "none"])
@pytest.mark.parametrize(("name", "level"), [("clip", "token"), ("clip", "sequence"), ("gmpo", "token")])
def test_any_length_norm_divides_the_sum_over_tokens_of_any_surrogate(name: str, level: str, norm: str) -> None:
    agree(name, level, random_data(2, 30), per_token=False, norm=norm)


@pytest.mark.parametrize(("name", "level"), CASES)
def test_float32_agrees_with_float64(name: str, level: str) -> None:
    data = random_data(3)
    exact, rounded = (data.logprobs.to(t).requires_grad_() for t in (torch.float64, torch.float32))
    wanted, found = (computed(name, level, x, data, data.advantages) for x in (exact, rounded))
    assert found.per_sequence.dtype == torch.float32
    torch.testing.assert_close(found.per_sequence, wanted.per_sequence.float(), rtol=1e-5, atol=1e-5)
    slopes = slope_of(found.per_sequence, rounded), slope_of(wanted.per_sequence, exact).float()
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_response_without_an_advantage_has_no_gradient_and_that_is_not_for_clipping(name: str, level: str) -> None:
    data = random_data(7)
    x = data.logprobs.clone().requires_grad_()
    result = computed(name, level, x, data, 0 * data.advantages)
    assert not slope_of(result.per_sequence, x).any() and not result.per_sequence.any() and not result.clipped.any()


def test_dapo_is_the_mean_over_all_tokens_of_the_mini_batch() -> None:
    data = random_data(4, 20)
    x, num_tokens = data.logprobs, sum(data.lengths)
    low, high, _ = BOUNDS["token"]
    total = sum(ppo((x[t] - data.old[t]).exp(), a, low, high) for t, a in enumerate(data.repeated()))
    found = computed("dapo", "token", x, data, data.advantages, tokens_per_sequence=num_tokens / 20).per_sequence
    assert found.sum().item() / 20 == pytest.approx(float(total) / num_tokens, rel=1e-12)


def test_cispo_is_the_mean_over_groups_of_the_mean_over_each_groups_tokens() -> None:
    data = random_data(8, 8)
    groups, low, high, _ = [range(3), range(3, 8)], *BOUNDS["token"]
    means = [sum(data.lengths[i] for i in group) / len(group) for group in groups for _ in group]
    own = torch.tensor(means, dtype=torch.float64)
    found = computed("cispo", "token", data.logprobs, data, data.advantages, tokens_per_sequence=own).per_sequence
    for group in groups:  # 2506.13585, Eq. 4: 1/Σ_i |o_i| Σ_i Σ_t
        total = sum(
            clipped_to((data.logprobs[t] - data.old[t]).exp().item(), 1 - low, 1 + high) * a * data.logprobs[t].item()
            for i, a in zip(group, data.advantages[list(group)].tolist(), strict=True)
            for t in data.rows()[i]
        )
        tokens = sum(data.lengths[i] for i in group)
        assert found[list(group)].mean().item() == pytest.approx(total / tokens, rel=1e-12)


def test_luspo_is_gspos_term_times_the_length() -> None:
    data = random_data(5)
    gspo, luspo = (
        computed(n, "sequence", data.logprobs, data, data.advantages).per_sequence for n in ("clip", "luspo")
    )
    torch.testing.assert_close(luspo, gspo * torch.tensor(data.lengths), rtol=1e-12, atol=0)


REFUSED = [
    (n, level) for n in PUBLISHED for level in ("token", "sequence", "sequence_token") if (n, level) not in CASES
]


@pytest.mark.parametrize(("name", "level"), REFUSED)
def test_a_level_that_a_surrogate_does_not_have_is_refused_with_the_reason(name: Any, level: Any) -> None:
    one = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"{name} has no level {level}") as refused:
        surrogate(one, one, one, torch.tensor([1, 1]), level=level, name=name, sampler_logprobs=one)
    assert len(ONLY[name]) > 20 and ONLY[name] in str(refused.value)


def test_what_a_surrogate_cannot_do_without_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_data(6, 3)
    some = (data.logprobs, data.old, data.advantages, torch.tensor(data.lengths))
    for name in BY_ENGINE:
        with pytest.raises(ValueError, match=rf"{name} .* needs sampler_logprobs"):
            surrogate(*some, name=name)
    with pytest.raises(ValueError, match=r"opsm_delta .* needs sampler_logprobs"):
        surrogate(*some, opsm_delta=0.1)
    for name, what in (("dapo", "mini-batch's mean"), ("cispo", "sequence's group"), ("dr_grpo", "longest response")):
        with pytest.raises(ValueError, match=f"tokens_per_sequence, the .*{what}"):
            surrogate(*some, name=name)
    unchecked = inspect.unwrap(surrogate)  # the shape checks of the test run would speak first
    monkeypatch.setattr(SurrogateSettings, "__init__", inspect.unwrap(SurrogateSettings.__init__))
    for wrong, match in (
        ({"name": "gspo"}, "unknown surrogate 'gspo': clip"),
        ({"level": "sentence"}, "unknown level 'sentence': token"),
        ({"length_norm": "batch"}, "unknown length_norm 'batch': own"),
        ({"clip_low": -0.1}, "clip_low is -0.1: it must be 0 or more"),
        ({"clip_high": math.nan}, "clip_high is nan: it must be 0 or more"),
        ({"dual_clip": 0.5}, "dual_clip is 0.5: it must be 1 or more"),
        ({"sampler_logprobs": data.engine[:1]}, "sampler_logprobs has 1 tokens"),
        ({"weights": torch.ones(3, 4)}, r"weights has the shape \[3, 4\]: .* weights\[mask\]"),
    ):
        with pytest.raises(ValueError, match=match):
            unchecked(*some, **wrong)
    with pytest.raises(ValueError, match=r"gmpo, level token: .* advantages do not fit"):
        unchecked(data.logprobs, data.old, data.token_advantages, torch.tensor(data.lengths), name="gmpo")
