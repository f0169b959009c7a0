"""The clipped surrogates: one function a published objective, chosen by the level of its importance ratio."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objective.ratio import sequence_mean, sequence_of_token, sequence_ratio

Level = Literal["token", "sequence", "sequence_token"]


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """What an objective says of B sequences with N packed response tokens."""

    per_sequence: Float[Tensor, "B"]  # the term under 1/G Σ_i, to be maximised
    clipped: Bool[Tensor, "N"]  # the token takes no part in the gradient because of clipping
    sequence_ratio: Float[Tensor, "B"]  # s_i, detached; whatever the level


def surrogate(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"] | Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    level: Level = "sequence",
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Surrogate:
    """The clipped surrogate with the importance ratio of the given level; its mean over sequences is maximised.

    `logprobs` are log π_θ of the response tokens and carry the gradient; `old_logprobs` log π_old. Advantages are one a
    sequence [B], or one a token [N] for sequence_token. Every response must have at least one token.
    Raises ValueError where shapes do not fit the level.
    """
    if int(lengths.sum()) != len(logprobs) or len(old_logprobs) != len(logprobs):
        raise ValueError(f"lengths sum to {int(lengths.sum())}, but there are {len(logprobs)} tokens")
    if level not in ("token", "sequence", "sequence_token"):
        raise ValueError(f"unknown level {level!r}: token, sequence or sequence_token")
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError("a response without tokens has no likelihood")
    if len(advantages) != len(lengths) and not (level == "sequence_token" and len(advantages) == len(logprobs)):
        raise ValueError(f"level {level}: {len(advantages)} advantages do not fit {len(lengths)} sequences")
    objective = {"sequence": gspo, "sequence_token": gspo_token, "token": grpo}[level]
    per_sequence, clipped = objective(logprobs, old_logprobs, advantages, lengths, clip_low, clip_high)
    ratio = sequence_ratio(logprobs.detach(), old_logprobs, lengths)
    return Surrogate(per_sequence=per_sequence, clipped=clipped, sequence_ratio=ratio)


def gspo(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    advantages: Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "B"], Bool[Tensor, "N"]]:
    """GSPO: min(s_i Â_i, clip(s_i, 1-ε_low, 1+ε_high) Â_i) (arXiv 2507.18071, Eq. 6)."""
    s = sequence_ratio(logprobs, old_logprobs, lengths)
    per_sequence, clipped = _clipped_minimum(s, advantages, clip_low, clip_high)
    return per_sequence, clipped[sequence_of_token(lengths)]


def gspo_token(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"] | Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "B"], Bool[Tensor, "N"]]:
    """GSPO-token: the mean over tokens of Eq. 6's term with s_{i,t} = sg[s_i] · π_θ/sg[π_θ] (Eq. 14-15).

    With Â_{i,t} = Â_i it equals GSPO in value, clipping and gradient (Eq. 18).
    """
    sequences = sequence_of_token(lengths)
    s = sequence_ratio(logprobs, old_logprobs, lengths).detach()
    s_token = s[sequences] * (logprobs - logprobs.detach()).exp()
    token_advantages = advantages if len(advantages) == len(logprobs) else advantages[sequences]
    terms, clipped = _clipped_minimum(s_token, token_advantages, clip_low, clip_high)
    return sequence_mean(terms, lengths), clipped


def grpo(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    advantages: Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "B"], Bool[Tensor, "N"]]:
    """GRPO: 1/|y_i| Σ_t min(w_t Â_i, clip(w_t) Â_i) with the token ratio w_t (arXiv 2402.03300; 2507.18071 Eq. 2-3)."""
    w = (logprobs - old_logprobs).exp()
    terms, clipped = _clipped_minimum(w, advantages[sequence_of_token(lengths)], clip_low, clip_high)
    return sequence_mean(terms, lengths), clipped


def _clipped_minimum(
    ratio: Float[Tensor, "M"], advantages: Float[Tensor, "M"], clip_low: float, clip_high: float
) -> tuple[Float[Tensor, "M"], Bool[Tensor, "M"]]:
    """min(ratio·Â, clip(ratio)·Â), and where the clipped side is the smaller, so that no gradient passes."""
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return torch.minimum(ratio * advantages, clipped_ratio * advantages), clipped.detach()
