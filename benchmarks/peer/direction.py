"""A direction in the space of a model's weights, which two programs draw alike: torch alone is imported."""

import torch


def along(model: torch.nn.Module) -> float:
    """The part of a model's gradient along a random direction, whose numbers a weight's name decides."""
    total = 0.0
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            dice = torch.Generator().manual_seed(sum(name.encode()) * 1009 + len(name))
            total += float((weight.grad.double() * torch.randn(weight.shape, generator=dice).double()).sum())
    return total
