"""Tokens drawn from q, which the recipe shapes: against the equation in float64, and against transformers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sampling import generate
from transformers.generation import logits_process as hf

from gspo.engine.embedded.sampling import sample_tokens
from gspo.engine.engine import Sampling
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig

NewPolicy = Callable[..., Policy]
V = 12
SEEN = (1, 4, 5, 9)
BIAS = {0: -100.0, 4: 2.5, 7: -1.0}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"min_p": 0.08},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 0.5},
    {"logit_bias": BIAS, "temperature": 2.0},
    {"top_k": 7, "top_p": 0.8},
    {"logit_bias": BIAS, "repetition_penalty": 1.3, "temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.1},
]


def normalised(p: Sequence[float]) -> list[float]:
    return [value / math.fsum(p) for value in p]


def softmax(logits: Sequence[float]) -> list[float]:
    return normalised([math.exp(value - max(logits)) for value in logits])


def q_of(
    logits: Sequence[float],
    seen: Sequence[int] = (),
    *,
    temperature: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Bias, penalty, temperature, top-k, top-p, min-p, each by its equation; every cut is normalised at once."""
    logits = [value + (logit_bias or {}).get(token, 0.0) for token, value in enumerate(logits)]
    for token in set(seen):
        logits[token] *= repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
    p = softmax([value / temperature for value in logits])
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if top_k:
        p = normalised([value if token in order[:top_k] else 0.0 for token, value in enumerate(p)])
    if top_p < 1:
        num_kept = next(n for n in range(1, len(p) + 1) if math.fsum(p[token] for token in order[:n]) >= top_p)
        p = normalised([value if token in order[:num_kept] else 0.0 for token, value in enumerate(p)])
    return normalised([value if value >= min_p * max(p) else 0.0 for value in p])


def by_number(cumulated: Sequence[float], number: float) -> int:
    return next(token for token, end in enumerate(cumulated) if end > number)


def drawn(logits: torch.Tensor, settings: Mapping[str, Any], uniform: torch.Tensor) -> Any:
    """Tokens, log q and log π of one row of logits, for each of the numbers."""
    rows = len(uniform)
    seen = torch.zeros(rows, V, dtype=torch.bool)
    seen[:, list(SEEN)] = True
    bias = torch.tensor([settings.get("logit_bias", {}).get(token, 0.0) for token in range(V)])
    return sample_tokens(
        logits.expand(rows, -1),
        Sampling(**{name: value for name, value in settings.items() if name != "logit_bias"}),
        uniform,
        bias=bias if "logit_bias" in settings else None,
        seen=seen if "repetition_penalty" in settings else None,
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("large", [4096, 0])
def test_every_number_draws_the_token_of_q_by_the_inverse_of_its_sums(
    settings: dict[str, Any], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.engine.embedded.sampling._LARGE", large)
    monkeypatch.setattr("gspo.engine.embedded.sampling._BLOCK", 5)
    for seed in range(3):
        logits = 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed))
        q = q_of(logits.double().tolist(), SEEN, **settings)
        pi = softmax([value / settings.get("temperature", 1.0) for value in logits.double().tolist()])
        cumulated = [math.fsum(q[: token + 1]) for token in range(V)]
        numbers = [number / 1000 + 0.00037 for number in range(1000)]
        numbers = [number for number in numbers if min(abs(number - end) for end in cumulated) > 1e-6]
        uniform = torch.tensor([0.0, *numbers], dtype=torch.float64)
        token, logprob, full_logprob = drawn(logits, settings, uniform)
        expected = [by_number(cumulated, number) for number in uniform.tolist()]
        assert token.tolist() == expected
        assert logprob.tolist() == pytest.approx([math.log(q[token]) for token in expected], abs=2e-6)
        if not settings:
            assert full_logprob is None  # q is π
        else:
            assert full_logprob.tolist() == pytest.approx([math.log(pi[token]) for token in expected], abs=2e-6)


@pytest.mark.parametrize("settings", SETTINGS[1:], ids=str)
def test_q_is_that_of_transformers_in_the_same_order(settings: dict[str, Any]) -> None:
    steps = {
        "logit_bias": lambda bias: hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    chain = hf.LogitsProcessorList([make(settings[name]) for name, make in steps.items() if name in settings])
    logits = 2 * torch.randn(V, generator=torch.Generator().manual_seed(7))
    theirs = chain(torch.tensor([SEEN]), logits[None].clone())[0].softmax(-1)
    token, logprob, _ = drawn(logits, settings, torch.linspace(0, 1, 500, dtype=torch.float64))
    torch.testing.assert_close(logprob, theirs[token].log(), rtol=0, atol=1e-5)
    assert set(token.tolist()) >= set((theirs > 1 / 400).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("look_every", [1, 5])
def test_responses_have_log_q_of_their_own_history_and_log_pi_of_the_model(
    look_every: int, new_policy: NewPolicy, refilling: Any
) -> None:
    joined = refilling("fast", look_every)
    policy = replace(new_policy("qwen3"), stop_ids=(5, 6, 7))
    settings: dict[str, Any] = {"temperature": 1.2, "repetition_penalty": 1.6, "top_p": 0.9, "min_p": 0.02}
    sampling = RolloutConfig(max_new_tokens=14, max_rows=6, logit_bias={"id:8": -3, "id:9": 1.5}, **settings)
    prompts = [[4, 5, 6], [7], [3, 9, 8, 4, 5, 5, 10], [6, 6], [12, 11]]
    groups = generate(policy, prompts, sampling, group_size=3, seed=0)
    for prompt, response in ((prompt, own) for prompt, group in zip(prompts, groups, strict=True) for own in group):
        ids = [*prompt, *response.token_ids.tolist()]
        with torch.no_grad():
            table = policy.model(input_ids=torch.tensor([ids])).logits[0].double().tolist()
        expected, full = [], []
        for place in range(len(prompt), len(ids)):
            q = q_of(table[place - 1], ids[:place], logit_bias={8: -3, 9: 1.5}, **settings)
            expected.append(math.log(q[ids[place]]))
            full.append(math.log(softmax([value / 1.2 for value in table[place - 1]])[ids[place]]))
        assert response.sampler_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
        assert response.engine_logprobs.tolist() == pytest.approx(full, abs=1e-4)
    assert joined  # rows were taken in with histories of their own
