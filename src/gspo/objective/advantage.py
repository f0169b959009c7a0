"""Advantages from rewards."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objective.ratio import sequence_mean, sequence_of_token
from gspo.published import Advantage


def group_advantages(
    rewards: Float[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    *,
    kind: Advantage = "group",
    ddof: int = 1,
) -> Float[Tensor, "B"]:
    """Each reward compared with its group's; by default in units of the group's standard deviation (Eq. 7).

    `group`: (r - mean)/std of the group. `group_mean`: r - mean (Dr. GRPO, arXiv 2503.20783). `leave_one_out`: r - the
    mean of the others (RLOO, 2402.14740). `batch`: (r - the group's mean)/std of all rewards (2508.08221). A variance
    is divided by n - ddof, which the paper leaves open. A group of equal rewards, and a lone reward, has advantage
    exactly 0. A NaN reward stands for "not scored": it takes no part in its group and gets 0.
    """
    lengths = torch.ones(len(rewards), dtype=torch.long, device=rewards.device)
    return token_advantages(rewards, lengths, group_ids, kind=kind, ddof=ddof)


def token_advantages(
    rewards: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    *,
    kind: Advantage = "group",
    ddof: int = 1,
) -> Float[Tensor, "N"]:
    """The same where every token has a reward of its own; each response weighs 1 in its group, its tokens 1/|y_i|.

    A group's mean is that of its responses' mean rewards, its variance Σ_i 1/|y_i| Σ_t (r_{i,t} - mean)² / (n - ddof):
    where all tokens of a response have the same reward this is `group_advantages`. A response with a NaN is not scored.
    """
    if kind == "gae":
        raise ValueError("gae takes a value model: advantages_and_returns")
    sequences = sequence_of_token(lengths)
    scored = ~torch.isnan(sequence_mean(rewards, lengths))
    values = torch.where(scored[sequences], rewards, 0.0)
    _, members = torch.unique(group_ids, return_inverse=True)
    num_groups = int(members.max()) + 1 if len(members) else 0

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(num_groups).index_add_(0, members, x)

    count = total(scored.to(rewards.dtype))[members]
    own = sequence_mean(values, lengths)
    mean = (total(own)[members] / count.clamp(min=1))[sequences]
    centre = mean
    if kind == "leave_one_out":
        centre = ((total(own)[members] - own) / (count - 1).clamp(min=1))[sequences]
    varied = _varied(values, scored[sequences], members[sequences], num_groups) & scored[sequences]
    deviation = torch.where(varied, values - centre, 0.0)
    if kind in ("group_mean", "leave_one_out"):
        return deviation
    if kind == "batch":
        variance = _variance(values, lengths, scored, torch.zeros_like(members), ddof)
    else:
        variance = _variance(values, lengths, scored, members, ddof)
    return deviation / torch.where(varied, variance.sqrt()[sequences], 1.0)


def _variance(
    values: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    scored: Bool[Tensor, "B"],
    members: Int[Tensor, "B"],
    ddof: int,
) -> Float[Tensor, "B"]:
    """Of each response's group."""

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(int(members.max()) + 1 if len(members) else 0).index_add_(0, members, x)[members]

    count = total(scored.to(values.dtype))
    mean = total(sequence_mean(values, lengths)) / count.clamp(min=1)
    sequences = sequence_of_token(lengths)
    deviation = torch.where(scored[sequences], values - mean[sequences], 0.0)
    return total(sequence_mean(deviation**2, lengths)) / (count - ddof).clamp(min=1)


def _varied(
    values: Float[Tensor, "N"], scored: Bool[Tensor, "N"], groups: Int[Tensor, "N"], num_groups: int
) -> Bool[Tensor, "N"]:
    """Of each token, whether the rewards of its group differ by more than rounding.

    Rewards that are equal, or would be but for rounding (0.1 + 0.2 and 0.3), are found by comparison: the deviation
    that rounding leaves would be blown up to ±1.
    """
    bounds = torch.full((2, num_groups), torch.inf, dtype=values.dtype, device=values.device)
    for row, sign in enumerate((1.0, -1.0)):
        bounds[row].scatter_reduce_(0, groups, torch.where(scored, sign * values, torch.inf), reduce="amin")
    lowest, highest = bounds[0], -bounds[1]
    rounding = 16 * torch.finfo(values.dtype).eps * torch.maximum(lowest.abs(), highest.abs())
    return (highest - lowest > rounding)[groups]
