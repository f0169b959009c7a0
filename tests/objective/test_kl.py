"""The KL estimators, by exact enumeration over a small categorical distribution."""

import inspect
import math
from typing import Any

import pytest
import torch

from gspo.objective import kl_estimate

ESTIMATORS = ["k1", "k2", "k3"]
REFERENCE = torch.tensor([0.1, 0.35, 0.05, 0.3, 0.2], dtype=torch.float64)


def logits() -> torch.Tensor:
    return torch.tensor([0.3, -0.8, 0.9, 0.0, -0.2], dtype=torch.float64, requires_grad=True)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return sum((a * (a.log() - b.log()) for a, b in zip(p, q, strict=True)), torch.zeros((), dtype=torch.float64))


def test_an_estimator_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="unknown estimator 'k4': k1, k2, k3"):
        inspect.unwrap(kl_estimate)(REFERENCE, REFERENCE, "k4")
    with pytest.raises(ValueError, match=r"same tokens, not of shapes \[5\] and \[5, 1\]"):
        inspect.unwrap(kl_estimate)(REFERENCE, REFERENCE[:, None], "k3")


def expected_value(estimator: Any, z: torch.Tensor) -> float:
    policy = z.softmax(0).detach()
    return float((policy * kl_estimate(policy.log(), REFERENCE.log(), estimator)).sum())


def expected_gradient(estimator: Any, z: torch.Tensor) -> torch.Tensor:
    """Σ_y π(y) ∇ estimate(y): of samples that do not know they come from π, as in a loss."""
    estimates = kl_estimate(z.log_softmax(0), REFERENCE.log(), estimator)
    return torch.autograd.grad((z.softmax(0).detach() * estimates).sum(), z)[0]


@pytest.mark.parametrize("gap", [-2.0, -0.1, 0.0, 0.4, 3.0])
def test_the_estimates_are_those_of_the_equations(gap: float) -> None:
    expected = {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}
    for estimator, value in expected.items():
        new, reference = torch.tensor([-1.0 + gap, -1.0], dtype=torch.float64), torch.full((2,), -1.0).double()
        found = kl_estimate(new, reference, estimator)  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx([value, 0.0], rel=1e-9, abs=1e-14)
        assert estimator == "k1" or (found >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_the_kl_in_the_mean(estimator: str) -> None:
    z = logits()
    assert expected_value(estimator, z) == pytest.approx(kl(z.softmax(0), REFERENCE).item(), rel=1e-12)


def test_k2_is_not_the_kl_in_the_mean_unless_the_two_are_near() -> None:
    z = logits()
    true = kl(z.softmax(0), REFERENCE).item()
    assert abs(expected_value("k2", z) / true - 1) > 0.01
    near = (REFERENCE.log() + 1e-3 * z.detach()).requires_grad_()
    assert expected_value("k2", near) == pytest.approx(kl(near.softmax(0), REFERENCE).item(), rel=1e-2)


def test_k2_has_the_gradient_of_the_kl_in_the_mean() -> None:
    z = logits()
    (wanted,) = torch.autograd.grad(kl(z.softmax(0), REFERENCE), z)
    torch.testing.assert_close(expected_gradient("k2", z), wanted, rtol=1e-10, atol=1e-14)


def test_k1_has_no_gradient_in_the_mean_and_k3_that_of_the_reverse_kl() -> None:
    z = logits()
    assert expected_gradient("k1", z).abs().max() < 1e-15
    (reverse,) = torch.autograd.grad(kl(REFERENCE, z.softmax(0)), z)
    torch.testing.assert_close(expected_gradient("k3", z), reverse, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_reference_has_no_kl_from_itself_and_no_pull(estimator: str) -> None:
    z = REFERENCE.log().clone().requires_grad_()
    assert expected_value(estimator, z) == pytest.approx(0, abs=1e-15)
    assert expected_gradient(estimator, z).abs().max() < 1e-15
