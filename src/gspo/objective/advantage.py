"""Advantages from rewards."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def group_advantages(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Each reward's deviation from its group's mean in units of the group's standard deviation (Eq. 7).

    The divisor of the deviation is n-1, which the paper leaves open. A group of equal rewards, and a lone reward,
    has advantage exactly 0. A NaN reward stands for "not scored": it takes no part in its group and gets 0.
    """
    scored = ~torch.isnan(rewards)
    _, members = torch.unique(group_ids, return_inverse=True)
    num_groups = int(members.max()) + 1 if len(members) else 0
    values = torch.where(scored, rewards, 0.0)

    def total(x: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=rewards.dtype, device=rewards.device).index_add_(0, members, x)

    count = total(scored.to(rewards.dtype))
    mean = total(values) / count.clamp(min=1)
    deviation = torch.where(scored, rewards - mean[members], 0.0)
    std = (total(deviation**2) / (count - 1).clamp(min=1)).sqrt()
    # Rewards that are equal, or would be but for rounding (0.1 + 0.2 and 0.3), are found by comparison: the deviation
    # that rounding leaves would be blown up to ±1.
    bounds = torch.full((2, num_groups), torch.inf, dtype=rewards.dtype, device=rewards.device)
    for row, sign in enumerate((1.0, -1.0)):
        bounds[row].scatter_reduce_(0, members, torch.where(scored, sign * rewards, torch.inf), reduce="amin")
    lowest, highest = bounds[0], -bounds[1]
    rounding = 16 * torch.finfo(rewards.dtype).eps * torch.maximum(lowest.abs(), highest.abs())
    varied = (highest - lowest > rounding)[members] & scored
    return torch.where(varied, deviation / torch.where(varied, std[members], 1.0), 0.0)
