"""PPO's advantages from values, and the loss those values are learned by."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def advantages_and_returns(
    rewards: Float[Tensor, "T"], values: Float[Tensor, "T"], *, gamma: float, lam: float
) -> tuple[Float[Tensor, "T"], Float[Tensor, "T"]]:
    """GAE(γ, λ) of one response and the returns that its values should have been (arXiv 1506.02438, Eq. 16).

    δ_t = r_t + γ V_{t+1} - V_t, Â_t = Σ_k (γλ)^k δ_{t+k}; the return is Â_t + V_t. V_t is the value before token t;
    after the last one it is 0, for a response that was cut off too.
    """
    following = torch.cat([values[1:], values.new_zeros(1)])
    errors = rewards + gamma * following - values
    advantages = torch.empty_like(values)
    carried = values.new_zeros(())
    for t in range(len(values) - 1, -1, -1):
        carried = errors[t] + gamma * lam * carried
        advantages[t] = carried
    return advantages, advantages + values


def whitened(advantages: Sequence[Float[Tensor, "_"]]) -> list[Float[Tensor, "_"]]:
    """All tokens' advantages shifted and scaled to mean 0 and standard deviation 1 (where they differ at all)."""
    everything = torch.cat(list(advantages))
    std = everything.std() if len(everything) > 1 else everything.new_zeros(())
    scale = torch.where(std > 0, std, 1.0)
    return [(one - everything.mean()) / scale for one in advantages]


def value_loss(
    values: Float[Tensor, "N"], old_values: Float[Tensor, "N"], returns: Float[Tensor, "N"], clip: float | None
) -> Float[Tensor, "N"]:
    """½ max((V - R)², (V_old + clip(V - V_old, ±clip) - R)²) of each token: PPO's value loss; None: not clipped."""
    error = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return error / 2
