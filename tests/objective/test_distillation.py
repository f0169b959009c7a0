"""The advantage by which a teacher's distribution is learned, by exact enumeration over a small vocabulary."""

import inspect
from typing import Any

import pytest
import torch

from gspo.objective import distillation_advantages, surrogate

TEACHER = torch.tensor([[0.1, 0.35, 0.05, 0.3, 0.2], [0.02, 0.9, 0.04, 0.03, 0.01]], dtype=torch.float64).log()


def logits() -> torch.Tensor:
    rows = [[0.3, -0.8, 0.9, 0.0, -0.2], [0.1, 0.2, -0.3, 1.4, 0.0]]
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("level", ["token", "sequence_token"])
def test_the_expected_gradient_is_that_of_the_reverse_kl_at_each_token(level: str) -> None:
    """Of two tokens, each drawn by itself: E of the surrogate's gradient is -∇ of the mean KL(π‖π_teacher)."""
    z = logits()
    logprobs, expected = z.log_softmax(-1), torch.zeros_like(z)
    for first in range(5):
        for second in range(5):
            chosen = torch.tensor([first, second])[:, None]
            own, teachers = (rows.gather(1, chosen)[:, 0] for rows in (logprobs, TEACHER))
            advantages = distillation_advantages(own.detach(), teachers)
            options: Any = {"level": level, "clip_low": 0.2, "clip_high": 0.2, "name": "clip"}
            result = surrogate(own, own.detach(), advantages, torch.tensor([2]), **options)
            (gradient,) = torch.autograd.grad(result.per_sequence.sum(), z, retain_graph=True)
            expected += own.detach().sum().exp() * gradient
    divergence = (z.softmax(-1) * (logprobs - TEACHER)).sum(-1).mean()
    (falling,) = torch.autograd.grad(-divergence, z)
    torch.testing.assert_close(expected, falling, rtol=1e-12, atol=1e-14)


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    assert not distillation_advantages(TEACHER[0], TEACHER[0]).any()


def test_tokens_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same tokens, not of shapes \[2, 5\] and \[5\]"):
        inspect.unwrap(distillation_advantages)(TEACHER, TEACHER[0])
