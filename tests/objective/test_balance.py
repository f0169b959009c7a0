"""The router auxiliary loss against its formula, sequence by sequence, in float64."""

import pytest
import torch
from torch import Tensor

from gspo.objective import balance_loss

L, E, K = 3, 5, 2


def drawn(lengths: list[int], seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Logits of each layer, and experts that they have no part in."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(sum(lengths), E, generator=generator) * 2 for _ in range(L)]
    experts = torch.rand(sum(lengths), L, E, generator=generator).argsort(-1)[..., :K]
    return logits, experts


def written_out(logits: list[Tensor], experts: Tensor, lengths: list[int]) -> Tensor:
    """DeepSeek-V3, Eq. 17-20, of each sequence, mean over layers: Σ_i f_i P_i, f_i = E/(K T) Σ_t 1(i is chosen)."""
    found, start = [], 0
    for length in lengths:
        tokens = range(start, start + length)
        start += length
        total = torch.zeros((), dtype=torch.float64)
        for layer, table in enumerate(logits):
            for expert in range(E):
                chosen = sum(expert in experts[t, layer].tolist() for t in tokens)
                f = E / (K * length) * chosen
                probabilities = [table[t].double().exp()[expert] / table[t].double().exp().sum() for t in tokens]
                total = total + f * torch.stack(probabilities).sum() / length
        found.append(total / len(logits))
    return torch.stack(found)


@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 6]])
def test_value_and_gradient_are_those_of_the_formula(lengths: list[int]) -> None:
    logits, experts = drawn(lengths)
    ours, theirs = ([table.clone().requires_grad_() for table in logits] for _ in range(2))
    found, expected = balance_loss(ours, experts, torch.tensor(lengths)), written_out(theirs, experts, lengths)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    direction = torch.tensor([1.0, -2.0, 0.5][: len(lengths)])
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).norm() <= 1e-6 * other.grad.norm()
        assert other.grad.norm() > 1e-3


def test_experts_used_alike_cost_one_and_one_set_for_all_as_many_as_there_are() -> None:
    turns = torch.tensor([[[t % E, (t + 1) % E]] * L for t in range(2 * E)])
    for logits in (torch.zeros(2 * E, E), torch.randn(2 * E, E, generator=torch.Generator().manual_seed(0))):
        # Even in what is chosen: whatever the probabilities, for these add up to 1.
        assert balance_loss([logits] * L, turns, torch.tensor([2 * E])).item() == pytest.approx(1)
    one_set = torch.tensor([[[1, 3]] * L] * 4)
    certain = torch.full((4, E), -50.0).index_fill(1, torch.tensor([1, 3]), 0.0)
    assert balance_loss([certain] * L, one_set, torch.tensor([4])).item() == pytest.approx(E / K)
    flat = torch.zeros(4, E)
    assert balance_loss([flat] * L, one_set, torch.tensor([4])).item() == pytest.approx(1)


def test_a_sequences_loss_does_not_depend_on_the_others_beside_it() -> None:
    lengths = [4, 1, 9, 2]
    logits, experts = drawn(lengths, seed=3)
    together = balance_loss(logits, experts, torch.tensor(lengths))
    starts = [sum(lengths[:number]) for number in range(4)]
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = slice(start, start + length)
        alone = balance_loss([table[rows] for table in logits], experts[rows], torch.tensor([length]))
        assert alone.item() == pytest.approx(together[number].item(), rel=1e-6)


def test_the_gradient_evens_out_the_load() -> None:
    """Down the gradient, experts chosen more often than others lose probability, those chosen less gain."""
    experts = torch.tensor([[[0, 1]], [[0, 2]], [[0, 1]]])
    logits = torch.zeros(3, E, requires_grad=True)
    balance_loss([logits], experts, torch.tensor([3])).sum().backward()
    assert logits.grad is not None
    slope = logits.grad.sum(0)
    assert slope[0] > slope[1] > 0 > slope[3] and slope[3] == slope[4]


def test_half_precision_logits_are_reckoned_in_float32() -> None:
    logits, experts = drawn([6, 2], seed=4)
    half = [table.bfloat16() for table in logits]
    found = balance_loss(half, experts, torch.tensor([6, 2]))
    assert found.dtype == torch.float32
    expected = written_out([table.double() for table in half], experts, [6, 2])
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
