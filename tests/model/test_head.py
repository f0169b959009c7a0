"""Log-likelihood, entropy and gradient of the head against the equation in float64, and what only it has to bear."""

from typing import Any

import pytest
import torch

from gspo.model.head import Head, token_likelihood, token_squared_errors

TOKENS, WIDTH, VOCABULARY = 23, 6, 11


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, bias, targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, bias, targets


def by_equation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    scale: float = 1.0,
    cap: float | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = scale * (hidden @ weight.T + (0 if bias is None else bias))
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    table = (logits / temperature).log_softmax(-1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


def leaves(*tensors: torch.Tensor | None, dtype: torch.dtype | None = None) -> list[Any]:
    return [None if t is None else t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("least", [0, 2**18])  # weights from which on oneDNN computes
@pytest.mark.parametrize("chunk_tokens", [1, 3, 50])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_value_entropy_and_gradient_are_those_of_the_equation(
    scale: float,
    cap: float | None,
    with_bias: bool,
    temperature: float,
    chunk_tokens: int,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gspo.model.linear._LEAST", least)
    monkeypatch.setattr("gspo.model.head.MAX_LOGITS", chunk_tokens * VOCABULARY)
    hidden, weight, bias, targets = inputs()
    given = (hidden, weight, bias if with_bias else None)
    exact = leaves(*given, dtype=torch.float64)
    expected, entropy = by_equation(
        exact[0], exact[1], exact[2], targets, scale=scale, cap=cap, temperature=temperature
    )
    upstream = torch.linspace(-1, 2, TOKENS)  # each token its own, 0 among them or not
    (expected * upstream).sum().backward()
    found = leaves(*given)
    head = Head(weight=found[1], bias=found[2], scale=scale, cap=cap)
    logprobs, found_entropy = token_likelihood(head, found[0], targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_entropy.double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    (logprobs * upstream).sum().backward()
    for mine, theirs in zip(found, exact, strict=True):
        if mine is not None:
            assert (mine.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


def test_the_gradient_is_added_to_what_is_there_and_the_same_at_a_second_pass() -> None:
    hidden, weight, bias, targets = [*leaves(*inputs()[:3]), inputs()[3]]
    head = Head(weight=weight, bias=bias)
    token_likelihood(head, hidden, targets, 1.0)[0].sum().backward()
    first = [t.grad.clone() for t in (hidden, weight, bias)]
    again = token_likelihood(head, hidden, targets, 1.0)[0].sum()
    again.backward(retain_graph=True)
    again.backward()  # of the same graph, whose logits are gone
    for tensor, once in zip((hidden, weight, bias), first, strict=True):
        torch.testing.assert_close(tensor.grad, 3 * once)


def test_a_gradient_of_its_gradient_is_refused() -> None:
    hidden, weight, bias, targets = [*leaves(*inputs()[:3]), inputs()[3]]
    logprobs, _ = token_likelihood(Head(weight=weight, bias=bias), hidden, targets, 1.0)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


@pytest.mark.parametrize("chunk_tokens", [1, 4, 10**6])
def test_the_gradient_of_bfloat16_weights_is_added_up_over_chunks_in_float32(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 4096  # all pull the same way: a bfloat16 sum would stand still where a term is below 1/256 of it
    generator = torch.Generator().manual_seed(1)
    hidden = (1 + 0.1 * torch.randn(number, WIDTH, generator=generator)).bfloat16()
    weight = (0.1 * torch.randn(VOCABULARY, WIDTH, generator=generator)).bfloat16()
    bias = torch.zeros(VOCABULARY, dtype=torch.bfloat16)
    targets = torch.full((number,), 3)
    exact = leaves(hidden, weight, bias, dtype=torch.float64)
    by_equation(exact[0], exact[1], exact[2], targets)[0].sum().backward()
    monkeypatch.setattr("gspo.model.head.MAX_LOGITS", chunk_tokens * VOCABULARY)
    found = leaves(hidden, weight, bias)
    token_likelihood(Head(weight=found[1], bias=found[2]), found[0], targets, 1.0)[0].sum().backward()
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert (mine.grad.double() - theirs.grad).norm() <= 2**-8 * theirs.grad.norm()


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_entropy_and_gradient_are_finite_where_tokens_have_probability_zero(size: float) -> None:
    hidden, weight = leaves(torch.eye(3), size * torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 0]]))
    logprobs, entropy = token_likelihood(Head(weight=weight), hidden, torch.tensor([0, 0, 2]), 1.0)
    third = torch.tensor(3.0).log().item()
    assert entropy.tolist() == pytest.approx([0, 0, third], abs=1e-6)
    assert logprobs.tolist() == pytest.approx([0, -size, -third], rel=1e-6, abs=1e-6)
    logprobs.sum().backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("size", [30.0, 1e3, 1e30])
def test_large_logits_cost_no_precision(size: float) -> None:
    hidden, weight = torch.eye(2), size * torch.tensor([[1.0, 1.0], [0, 1.0], [0, 1.0]])
    logprobs, entropy = token_likelihood(Head(weight=weight), hidden, torch.tensor([0, 1]), 1.0)
    third = torch.tensor(3.0).log().item()
    assert entropy.tolist() == pytest.approx([0, third], abs=1e-6)
    assert logprobs.tolist() == pytest.approx([0, -third], abs=1e-6)


def test_a_token_that_cannot_be_has_no_part_in_the_entropy() -> None:
    hidden, weight, bias, targets = inputs()
    bias[-1] = -torch.inf
    kept, targets = slice(VOCABULARY - 1), targets.clamp(max=VOCABULARY - 2)
    expected, entropy = by_equation(hidden.double(), weight[kept].double(), bias[kept].double(), targets)
    logprobs, found = token_likelihood(Head(weight=weight, bias=bias), hidden, targets, 1.0)
    torch.testing.assert_close(found.double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_no_tokens_have_no_likelihood() -> None:
    weight, hidden = leaves(torch.ones(VOCABULARY, WIDTH), torch.ones(0, WIDTH))
    logprobs, entropy = token_likelihood(Head(weight=weight), hidden, torch.zeros(0, dtype=torch.long), 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not weight.grad.any()


def test_logits_of_bfloat16_operands_are_not_rounded_to_bfloat16() -> None:
    """They would be 0.125 apart from 16 on."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(200, 64, generator=generator).bfloat16()
    weight = (3 * torch.randn(500, 64, generator=generator)).bfloat16()
    bias, targets = torch.randn(500, generator=generator).bfloat16(), torch.randint(500, (200,), generator=generator)
    exact = hidden.double() @ weight.double().T + bias.double()
    assert exact.abs().max() > 64
    head = Head(weight=weight, bias=bias)
    torch.testing.assert_close(head.logits(hidden).double(), exact, rtol=1e-5, atol=1e-4)
    states = hidden.clone().requires_grad_()
    weights = weight.clone().requires_grad_()
    logprobs, entropy = token_likelihood(Head(weight=weights, bias=bias), states, targets, 1.0)
    table = exact.log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), table.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), -(table.exp() * table).sum(-1), rtol=1e-4, atol=1e-4)
    logprobs.sum().backward()  # the probabilities in it are computed anew: from rounded logits they are off by 10 %
    slope = -table.exp()
    slope[torch.arange(200), targets] += 1
    for found, wanted in ((states.grad, slope @ weight.double()), (weights.grad, slope.T @ hidden.double())):
        assert found is not None and (found.double() - wanted).norm() <= 6e-3 * wanted.norm()


@pytest.mark.parametrize("chunk_tokens", [3, 50])
def test_a_squared_error_is_the_length_of_the_gradient_by_the_logits(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.model.head.MAX_LOGITS", chunk_tokens * VOCABULARY)
    hidden, weight, bias, targets = inputs()
    found = token_squared_errors(Head(weight=weight, bias=bias), hidden, targets, 0.6)
    logits = ((hidden.double() @ weight.double().T + bias.double()) / 0.6).requires_grad_()
    logits.log_softmax(-1)[torch.arange(TOKENS), targets].sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(found.double(), logits.grad.square().sum(-1), rtol=1e-5, atol=1e-6)
