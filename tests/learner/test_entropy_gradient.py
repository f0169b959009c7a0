"""The entropy's gradient against autograd through a plain log_softmax in float64."""

from typing import Any

import pytest
import torch

from gspo.model.head import Head, token_likelihood

TOKENS, WIDTH, VOCABULARY = 19, 6, 11


def inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states, weight, bias; targets."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    given = [torch.randn(*shape, generator=generator) for shape in shapes]
    return given, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def plain(
    given: list[Any], targets: torch.Tensor, scale: float, cap: float | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, weight, bias = given
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = scale * logits
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    table = torch.log_softmax(logits / temperature, -1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 50])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_the_entropys_gradient_is_that_of_the_equation(
    with_logprobs: bool,
    scale: float,
    cap: float | None,
    with_bias: bool,
    temperature: float,
    chunk_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gspo.model.head.MAX_LOGITS", chunk_tokens * VOCABULARY)
    given, targets = inputs()
    of_entropy = torch.linspace(-1, 2, TOKENS)  # each token its own
    of_logprobs = torch.linspace(0.5, -1.5, TOKENS) if with_logprobs else torch.zeros(TOKENS)

    def leaves(dtype: torch.dtype) -> list[Any]:
        kept = given if with_bias else [*given[:2], None]
        return [
            None if t is None else t.to(dtype).requires_grad_()
            for t in (None if t is None else t.clone() for t in kept)
        ]

    exact, found = leaves(torch.float64), leaves(torch.float32)
    logprobs, entropy = plain(exact, targets, scale, cap, temperature)
    (logprobs * of_logprobs + entropy * of_entropy).sum().backward()
    head = Head(weight=found[1], bias=found[2], scale=scale, cap=cap)
    my_logprobs, my_entropy = token_likelihood(head, found[0], targets, temperature)
    torch.testing.assert_close(my_entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    total = (my_entropy * of_entropy).sum()
    if with_logprobs:  # or the gradient of one of the two outputs is None
        total = total + (my_logprobs * of_logprobs).sum()
    total.backward()
    for mine, theirs in zip(found, exact, strict=True):
        if mine is not None:
            assert (mine.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


def test_a_uniform_distribution_has_the_highest_entropy_and_no_gradient() -> None:
    weight = torch.zeros(VOCABULARY, WIDTH, requires_grad=True)
    entropy = token_likelihood(Head(weight=weight), torch.ones(3, WIDTH), torch.tensor([0, 5, 2]), 1.0)[1]
    assert entropy.tolist() == pytest.approx([torch.tensor(float(VOCABULARY)).log().item()] * 3)
    entropy.sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() < 1e-6


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_the_entropys_gradient_is_finite_where_tokens_have_probability_zero(size: float) -> None:
    hidden = torch.eye(3).requires_grad_()
    weight = (size * torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 0]])).requires_grad_()
    bias = torch.tensor([0.0, 0.0, -torch.inf]).requires_grad_()
    for head in (Head(weight=weight), Head(weight=weight, bias=bias)):
        token_likelihood(head, hidden, torch.tensor([0, 1, 0]), 1.0)[1].sum().backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None and torch.isfinite(tensor.grad).all()


def test_following_the_gradient_raises_the_entropy() -> None:
    given, targets = inputs()
    weight = given[1].clone().requires_grad_()
    before = token_likelihood(Head(weight=weight), given[0], targets, 1.0)[1].sum()
    before.backward()
    assert weight.grad is not None
    after = token_likelihood(Head(weight=weight.detach() + 1e-2 * weight.grad), given[0], targets, 1.0)[1].sum()
    assert after > before
