"""AdamW against torch's own, fp32 masters, schedules at their points, and gradients that must change nothing."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from gspo.learner.optimizer import Optimizer, StepReport
from gspo.recipe.sections import OptimizerConfig

NO_CLIP = 1e9


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)


def random_gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def take_step(optimizer: Optimizer, model: nn.Module, gradients: list[torch.Tensor], **arguments: Any) -> StepReport:
    """Give the parameters their gradients the way the backward pass does."""
    loss = sum((p.float() * g).sum() for p, g in zip(model.parameters(), gradients, strict=True))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return optimizer.step(**arguments)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("max_grad_norm", [NO_CLIP, 0.5])
def test_float32_steps_are_those_of_torchs_adamw(max_grad_norm: float) -> None:
    model, twin = small_model(), small_model()
    settings = OptimizerConfig(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=max_grad_norm)
    optimizer = Optimizer(model, settings, total_steps=20)
    adamw = torch.optim.AdamW(twin.parameters(), lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(20):
        gradients = random_gradients(model, step)
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), max_grad_norm)
        report = take_step(optimizer, model, gradients)
        adamw.step()
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-6)  # before clipping
        assert report.applied
        for found, expected in zip(weights(model), weights(twin), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_gradients_are_cleared_by_a_step() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=NO_CLIP), total_steps=2)
    gradients = random_gradients(model, 0)
    norms = [take_step(optimizer, model, gradients).grad_norm for _ in range(2)]
    assert norms[0] == norms[1] > 0


def test_clipping_bounds_the_gradient_and_keeps_its_direction() -> None:
    # With a huge eps AdamW's first step is lr · g / eps: the weights show the gradient that was applied.
    model = small_model()
    optimizer = Optimizer(model, OptimizerConfig(lr=1e3, eps=1e6, max_grad_norm=2.0), total_steps=1)
    before, gradients = weights(model), random_gradients(model, 0)
    report = take_step(optimizer, model, gradients)
    applied = torch.cat([(p - q).flatten() for p, q in zip(before, weights(model), strict=True)]) * 1e3
    raw = torch.cat([g.flatten() for g in gradients])
    assert report.grad_norm == pytest.approx(float(raw.norm()), rel=1e-6)
    assert report.grad_norm > 2
    torch.testing.assert_close(applied, raw * 2 / raw.norm(), rtol=1e-3, atol=1e-3)


def test_updates_below_bfloat16_precision_move_the_weights_in_the_end() -> None:
    def after_constant_gradients(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        model, plain = (nn.Linear(4, 1, bias=False) for _ in range(2))
        for module in (model, plain):
            nn.init.ones_(module.weight)
            module.to(torch.bfloat16)
        optimizer = Optimizer(model, OptimizerConfig(lr=1e-4, max_grad_norm=NO_CLIP), total_steps=number)
        adamw = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.0)
        for _ in range(number):
            take_step(optimizer, model, [torch.ones(1, 4)])
            plain.weight.grad = torch.ones_like(plain.weight)
            adamw.step()
        return model.weight, plain.weight

    ours, _ = after_constant_gradients(10)
    assert ours.tolist() == [[1.0] * 4]  # 10 · 1e-4 is below half of bfloat16's spacing of 2⁻⁸
    ours, without_masters = after_constant_gradients(100)
    assert ours.dtype == torch.bfloat16
    assert ours.tolist() == [[1 - 3 * 2**-8] * 4]  # 1 - 100 · 1e-4, rounded
    assert without_masters.tolist() == [[1.0] * 4]


def test_bfloat16_weights_are_the_rounded_weights_of_float32_training() -> None:
    model, twin = small_model(torch.bfloat16), small_model(torch.bfloat16).float()
    settings = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=NO_CLIP)
    optimizer, exact = (Optimizer(m, settings, total_steps=30) for m in (model, twin))
    for step in range(30):
        gradients = [g.bfloat16().float() for g in random_gradients(model, step)]
        take_step(optimizer, model, gradients)
        take_step(exact, twin, gradients)
    assert same(weights(model), [p.bfloat16() for p in weights(twin)])


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=NO_CLIP), total_steps=1)
    for part in [1.0, *[2.0**-9] * 256]:  # in bfloat16 each of the small ones is lost beside 1
        (model.weight * part).sum().backward()
    assert optimizer.step().grad_norm == 1.5


def test_a_closed_optimizer_leaves_the_gradients_to_the_next() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    first = Optimizer(model, OptimizerConfig(max_grad_norm=NO_CLIP), total_steps=1)
    first.close()
    second = Optimizer(model, OptimizerConfig(max_grad_norm=NO_CLIP), total_steps=1)
    (model.weight * 3).sum().backward()
    assert second.step().grad_norm == 3.0
    assert first.step().grad_norm == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
def test_what_is_not_finite_changes_nothing_and_the_next_good_step_works(bad: float | None, dtype: torch.dtype) -> None:
    model, twin = small_model(dtype), small_model(dtype)
    optimizer, undisturbed = (Optimizer(m, OptimizerConfig(lr=1e-2), total_steps=9) for m in (model, twin))
    for m, o in ((model, optimizer), (twin, undisturbed)):
        take_step(o, m, random_gradients(m, 0))
    before, gradients = weights(model), random_gradients(model, 1)
    if bad is not None:
        gradients[1][2] = bad
    report = take_step(optimizer, model, gradients, loss_is_finite=bad is not None)
    assert not report.applied
    assert same(weights(model), before)
    after = take_step(optimizer, model, random_gradients(model, 2))
    take_step(undisturbed, twin, random_gradients(twin, 2))
    assert after.applied
    assert math.isfinite(after.grad_norm)
    assert same(weights(model), weights(twin))  # the moments, too, know nothing of the bad gradient
    assert not same(weights(model), before)


def test_a_step_without_any_gradient_lets_the_moments_carry_on() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-2), total_steps=2)
    start = weights(model)
    report = optimizer.step()
    assert report.applied
    assert report.grad_norm == 0
    assert same(weights(model), start)


LR = 0.5
WARM = [LR * k / 4 for k in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("schedule", "min_lr_fraction", "expected"),
    [
        ("constant", 0.0, [*WARM, *[LR] * 6]),
        ("linear", 0.0, [*WARM, *[LR * (1 - k / 6) for k in range(6)]]),
        ("linear", 0.1, [*WARM, *[LR * (0.1 + 0.9 * (1 - k / 6)) for k in range(6)]]),
        ("cosine", 0.0, [*WARM, *[LR * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]]),
        ("cosine", 0.2, [*WARM, *[LR * (0.2 + 0.8 * (1 + math.cos(math.pi * k / 6)) / 2) for k in range(6)]]),
    ],
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(
    schedule: Any, min_lr_fraction: float, expected: list[float]
) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings = OptimizerConfig(lr=LR, warmup_steps=4, schedule=schedule, min_lr_fraction=min_lr_fraction)
    optimizer = Optimizer(model, settings, total_steps=10)
    reported, moved, at = [], [], 0.0
    for _ in expected:
        reported.append(take_step(optimizer, model, [torch.ones(1, 1)]).learning_rate)
        moved.append(at - model.weight.item())  # under a constant gradient Adam moves by the rate itself
        at = model.weight.item()
    assert reported == pytest.approx(expected, rel=1e-12)
    assert moved == pytest.approx(expected, rel=1e-4)
    assert optimizer.learning_rate == pytest.approx(LR if schedule == "constant" else LR * min_lr_fraction, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_stays_at_its_floor_after_the_last_step(schedule: Any) -> None:
    settings = OptimizerConfig(lr=1.0, schedule=schedule, min_lr_fraction=0.25)
    optimizer = Optimizer(nn.Linear(1, 1), settings, total_steps=4)
    rates = [optimizer.step().learning_rate for _ in range(8)]
    assert rates[4:] == pytest.approx([0.25] * 4)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_without_warm_up_the_first_step_has_the_full_rate(schedule: Any) -> None:
    optimizer = Optimizer(nn.Linear(1, 1), OptimizerConfig(lr=0.5, schedule=schedule), total_steps=3)
    assert optimizer.step().learning_rate == 0.5
