"""Tokens, drawn by the thousand, against the softmax they should come from."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sampling import generate

from gspo.engine.embedded.sampling import sample_tokens, uniform_numbers
from gspo.engine.engine import Sampling
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey

NewPolicy = Callable[..., Policy]
PROMPT = [4, 5, 6]
COUNT = 20_000
COUNT_OF_ENGINE = 4_000


def probabilities(policy: Policy, temperature: float) -> list[float]:
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].double()
    return (logits / temperature).softmax(-1).tolist()


def drawn(policy: Policy, **settings: Any) -> Counter[int]:
    """What is drawn from the logits of the first token, with the random numbers of as many responses."""
    keys = SamplingKey(seed=0, step=1).of_groups(["0"], COUNT)[0]
    uniform = uniform_numbers(keys, [0] * COUNT, 1)[:, 0]
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].expand(COUNT, -1)
    token, *_ = sample_tokens(logits, Sampling(**settings), uniform)
    return Counter(token.tolist())


def first_tokens(policy: Policy, **settings: Any) -> Counter[int]:
    """The first tokens of the engine's responses."""
    sampling = RolloutConfig(max_new_tokens=1, max_rows=COUNT_OF_ENGINE, **settings)
    (group,) = generate(policy, [PROMPT], sampling, group_size=COUNT_OF_ENGINE, seed=0)
    return Counter(int(response.token_ids[0]) for response in group)


def top_k_of(p: list[float], k: int) -> list[float]:
    best = sorted(range(len(p)), key=lambda i: -p[i])[:k]
    return normalised([value if i in best else 0.0 for i, value in enumerate(p)])


def top_p_of(p: list[float], mass: float) -> list[float]:
    """Only the most probable tokens, as many as it takes to reach the mass."""
    kept: list[int] = []
    for i in sorted(range(len(p)), key=lambda i: -p[i]):
        if sum(p[j] for j in kept) >= mass:
            break
        kept.append(i)
    return normalised([value if i in kept else 0.0 for i, value in enumerate(p)])


def normalised(p: list[float]) -> list[float]:
    return [value / sum(p) for value in p]


def check_drawn_from(counts: Counter[int], p: list[float]) -> None:
    """Nothing of probability 0, and a χ² within five standard deviations of its mean (rare tokens taken together)."""
    total = counts.total()
    assert all(p[token] > 0 for token in counts)
    frequent = [i for i, value in enumerate(p) if value * total >= 20]
    cells = [(counts[i], p[i] * total) for i in frequent]
    rare = 1 - sum(p[i] for i in frequent)
    if rare * total > 1:
        cells.append((total - sum(counts[i] for i in frequent), rare * total))
    freedom = len(cells) - 1
    assert freedom >= 1
    chi_square = sum((found - expected) ** 2 / expected for found, expected in cells)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(temperature: float, new_policy: NewPolicy) -> None:
    policy = new_policy("gemma2")
    check_drawn_from(first_tokens(policy, temperature=temperature), probabilities(policy, temperature))


def test_the_check_tells_one_temperature_from_another(new_policy: NewPolicy) -> None:
    policy = new_policy("gemma2")
    with pytest.raises(AssertionError):
        check_drawn_from(first_tokens(policy, temperature=0.9), probabilities(policy, 1.0))


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_draws_from_the_k_best(top_k: int, new_policy: NewPolicy) -> None:
    policy = new_policy("gemma2")
    p = top_k_of(probabilities(policy, 0.8), top_k)
    counts = drawn(policy, temperature=0.8, top_k=top_k)
    assert set(counts) == {i for i, value in enumerate(p) if value > 0}
    assert len(counts) == top_k
    if top_k > 1:
        check_drawn_from(counts, p)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.6, 0.9])
def test_top_p_draws_from_the_smallest_set_that_has_the_mass(top_p: float, new_policy: NewPolicy) -> None:
    policy = new_policy("gemma2")
    p = top_p_of(probabilities(policy, 1.0), top_p)
    counts = drawn(policy, top_p=top_p)
    assert set(counts) == {i for i, value in enumerate(p) if value > 0}
    if len(counts) > 1:
        check_drawn_from(counts, p)


def test_top_p_is_taken_of_what_top_k_leaves(new_policy: NewPolicy) -> None:
    policy = new_policy("gemma2")
    p = top_p_of(top_k_of(probabilities(policy, 1.0), 6), 0.7)
    assert p != top_p_of(probabilities(policy, 1.0), 0.7)
    counts = first_tokens(policy, top_k=6, top_p=0.7)
    assert set(counts) == {i for i, value in enumerate(p) if value > 0}
    check_drawn_from(counts, p)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53], ids=["smallest", "largest"])
@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.01}], ids=str)
def test_no_random_number_draws_a_token_of_probability_zero(
    settings: dict[str, Any], number: float, new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = new_policy("gemma2")
    numbers = torch.full((1, 1), number, dtype=torch.float64)
    monkeypatch.setattr("gspo.engine.embedded.decoding.uniform_numbers", lambda *_: numbers)
    p = probabilities(policy, settings.get("temperature", 1.0))
    p = top_k_of(p, settings.get("top_k", len(p)))
    p = top_p_of(p, settings["top_p"]) if "top_p" in settings else p
    (group,) = generate(policy, [PROMPT], RolloutConfig(max_new_tokens=1, **settings), group_size=1, seed=0)
    assert p[group[0].token_ids[0]] > 1e-30


def test_top_k_beyond_the_vocabulary_and_top_p_of_one_cut_nothing(new_policy: NewPolicy) -> None:
    policy = new_policy("gemma2")
    assert drawn(policy, top_k=10**6, top_p=1.0) == drawn(policy)


def test_later_tokens_are_drawn_given_the_ones_before(new_policy: NewPolicy) -> None:
    policy = new_policy("gemma2")
    sampling = RolloutConfig(max_new_tokens=2, max_rows=COUNT_OF_ENGINE, temperature=0.7)
    (group,) = generate(policy, [PROMPT], sampling, group_size=COUNT_OF_ENGINE, seed=1)
    pairs = Counter(tuple(response.token_ids.tolist()) for response in group if len(response.token_ids) == 2)
    (first,) = {ids[0] for ids, _ in pairs.most_common(1)}
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*PROMPT, first]])).logits[0, -1].double()
    seconds = Counter({ids[1]: count for ids, count in pairs.items() if ids[0] == first})
    check_drawn_from(seconds, (logits / 0.7).softmax(-1).tolist())


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.6}, {"temperature": 0.3}])
@pytest.mark.parametrize("block", [1, 5, 37, 64])
def test_a_large_vocabulary_drawn_from_block_by_block_gives_the_same_tokens(
    block: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = 3 * torch.randn(400, 37, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(**settings)
    uniform = torch.rand(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = sample_tokens(logits, sampling, uniform)
    monkeypatch.setattr("gspo.engine.embedded.sampling._LARGE", 0)
    monkeypatch.setattr("gspo.engine.embedded.sampling._BLOCK", block)
    token, logprob, _ = sample_tokens(logits, sampling, uniform)
    assert token.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprob, expected[1])
    assert len(set(token.tolist())) > 10


def test_a_token_of_probability_0_is_never_drawn_at_the_edge_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((3, 9), -torch.inf)
    logits[:, 2], logits[:, 4] = 1.0, 0.5  # 5 and later: probability 0
    for large in (4096, 0):
        monkeypatch.setattr("gspo.engine.embedded.sampling._LARGE", large)
        monkeypatch.setattr("gspo.engine.embedded.sampling._BLOCK", 3)
        token, *_ = sample_tokens(logits, Sampling(), torch.ones(3, dtype=torch.float64))
        assert token.tolist() == [4, 4, 4]


@pytest.mark.parametrize("large", [4096, 0])
def test_logits_that_are_not_numbers_are_no_crash_of_the_sampler(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.engine.embedded.sampling._LARGE", large)
    logits = torch.zeros(2, 1030)
    logits[1] = torch.nan  # the run is stopped with its reason after the step
    token, logprob, _ = sample_tokens(logits, Sampling(), torch.tensor([0.3, 0.7], dtype=torch.float64))
    assert ((token >= 0) & (token < 1030)).all()
    assert logprob[0].isfinite() and logprob[1].isnan()


def test_at_temperature_0_the_likeliest_token_is_certain_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0 - 1e-6, -1.0], [2.0, 2.0, 1.0, 2.0]])
    greedy = Sampling(temperature=0.0)
    for number in (0.0, 0.999):
        uniform = torch.full((2,), number, dtype=torch.float64)
        token, logprob, full = sample_tokens(logits, greedy, uniform)
        assert token.tolist() == [1, 0] and logprob.tolist() == [0.0, 0.0] and full is None
    changed, *_ = sample_tokens(logits, greedy, uniform, bias=torch.tensor([0.0, -5.0, 0.0, 0.5]))
    assert changed.tolist() == [2, 3]
