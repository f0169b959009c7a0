"""PPO's advantages from values, and the loss by which the values are learned."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.objective.ratio import check_packed, sequence_of_token


def advantages_and_returns(
    rewards: Float[Tensor, "N"],
    values: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"] | None = None,
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """GAE(γ, λ) of each token, and its return, which is the target of its value (arXiv 1506.02438, Eq. 16).

    δ_t = r_t + γ V_{t+1} - V_t, Â_t = Σ_k (γλ)^k δ_{t+k}; the return is Â_t + V_t. V_t is the value before token t. The
    value after the last token is 0, also for a response that was cut off. Without `lengths` there is one response.
    """
    lengths = torch.tensor([len(rewards)]) if lengths is None else lengths
    check_packed(lengths, rewards=rewards, values=values)
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    following[(lengths.cumsum(0) - 1)[lengths > 0]] = 0
    errors = rewards + gamma * following - values
    advantages = discounted_sums(errors, lengths, torch.full_like(errors, gamma * lam))
    return advantages, advantages + values


def discounted_sums(
    values: Float[Tensor, "N"], lengths: Int[Tensor, "B"], discounts: Float[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """x_t = v_t + d_t x_{t+1} within each sequence, where d_t is the factor of the next token's sum."""
    if not len(values):
        return values.clone()
    sequences = sequence_of_token(lengths, len(values))
    position = positions(lengths, len(values))
    # A row a position, a column a sequence: one operation a position, whatever the number of sequences.
    by_position, factors = values.new_zeros(2, int(lengths.max()), len(lengths))
    by_position[position, sequences], factors[position, sequences] = values, discounts
    rows = by_position.unbind(0)
    for row, following, factor in zip(rows[-2::-1], rows[:0:-1], factors.unbind(0)[-2::-1], strict=True):
        row.addcmul_(following, factor)
    return by_position[position, sequences]


def positions(lengths: Int[Tensor, "B"], num_tokens: int) -> Int[Tensor, "N"]:
    """The position of each packed token in its sequence, from 0."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(num_tokens, device=lengths.device) - starts[sequence_of_token(lengths, num_tokens)]


def whitened(advantages: Sequence[Float[Tensor, "_"]]) -> list[Float[Tensor, "_"]]:
    """The advantages of all tokens, shifted to mean 0 and, unless they are equal, scaled to standard deviation 1."""
    everything = torch.cat(list(advantages))
    std = everything.std() if len(everything) > 1 else everything.new_zeros(())
    scale = torch.where(std > 0, std, 1.0)
    return [(values - everything.mean()) / scale for values in advantages]


def value_loss(
    values: Float[Tensor, "N"], old_values: Float[Tensor, "N"], returns: Float[Tensor, "N"], clip: float | None
) -> Float[Tensor, "N"]:
    """PPO's value loss of each token, ½ max((V - R)², (V_old + clip(V - V_old, ±clip) - R)²); None clips nothing."""
    error = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return error / 2
