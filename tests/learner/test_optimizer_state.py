"""An optimiser's state: what it holds, and that an optimiser put back goes on bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gspo.learner.optimizer import Optimizer, StepReport
from gspo.recipe.sections import OptimizerConfig


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)


def take_step(optimizer: Optimizer, model: nn.Module, seed: int, **arguments: Any) -> StepReport:
    """A step with random gradients, which the parameters get the way the backward pass gives them."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return optimizer.step(**arguments)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_put_back_goes_on_bit_by_bit(dtype: torch.dtype, taken: int, tmp_path: Path) -> None:
    settings = OptimizerConfig(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, warmup_steps=2, schedule="cosine")
    model, again = small_model(dtype), small_model(dtype)
    optimizer = Optimizer(model, settings, total_steps=9)
    for step in range(taken):
        take_step(optimizer, model, step, loss_is_finite=step != 2)
    save_file({name: tensor.contiguous() for name, tensor in optimizer.state().items()}, tmp_path / "state")
    copies = weights(model)
    expected = [take_step(optimizer, model, step) for step in range(taken, 9)]
    other = Optimizer(again, settings, total_steps=9)
    take_step(other, again, 99)  # what it has seen is to be forgotten
    with torch.no_grad():
        for parameter, copy in zip(again.parameters(), copies, strict=True):
            parameter.copy_(copy)
    other.restore(load_file(tmp_path / "state"))
    assert other.steps_taken == taken
    assert same(weights(again), copies)
    assert [take_step(other, again, step) for step in range(taken, 9)] == expected
    assert same(weights(again), weights(model))
    states = optimizer.state(), other.state()
    assert states[0].keys() == states[1].keys()
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


def test_a_state_names_what_it_is_of_and_is_no_copy() -> None:
    model = small_model(torch.bfloat16)
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-2), total_steps=9)
    names = [name for name, _ in model.named_parameters()]
    assert optimizer.state().keys() == {"steps_taken", *(f"master/{name}" for name in names)}
    take_step(optimizer, model, 0)
    keys = ("master", "step", "exp_avg", "exp_avg_sq")
    state = optimizer.state()
    assert state.keys() == {"steps_taken", *(f"{key}/{name}" for key in keys for name in names)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    take_step(optimizer, model, 1)
    assert not any(state[name].equal(before[name]) for name in state if name != "steps_taken")


def test_a_step_that_breaks_off_leaves_another_count_than_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-2), total_steps=9)
    take_step(optimizer, model, 0)
    take_step(optimizer, model, 1, loss_is_finite=False)
    assert optimizer.steps_taken == 2

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(optimizer._optimizers[0], "step", fail)
    with pytest.raises(MemoryError):
        take_step(optimizer, model, 2)
    assert optimizer.steps_taken == 3
