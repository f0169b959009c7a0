"""An objective put together: a ratio of some level, the form of the term, and what divides a sequence's sum."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objective.ratio import check_packed, importance_ratio, sequence_mean, sequence_of_token
from gspo.objective.terms import FORMS, SurrogateSettings, Units
from gspo.recipe.published import PUBLISHED, LengthNorm


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """The value of an objective for B sequences with N packed response tokens.

    Example: of responses of 2 and 1 tokens, per_sequence = [0.7, -0.7], clipped = [False, False, True].
    """

    per_sequence: Float[Tensor, "B"]  # the term under 1/G Σ_i, to be maximised
    clipped: Bool[Tensor, "N"]  # the token takes no part in the gradient because of clipping
    masked: Bool[Tensor, "N"]  # the token takes no part in it because a correction or OPSM dropped it
    sequence_ratio: Float[Tensor, "B"]  # s_i, detached; whatever the level


def surrogate(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"] | Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    *,
    settings: SurrogateSettings | None = None,
    sampler_logprobs: Float[Tensor, "N"] | None = None,
    weights: Float[Tensor, "N"] | None = None,
    tokens_per_sequence: float | Float[Tensor, "B"] | None = None,
    **options: Any,
) -> Surrogate:
    """Compute a published objective, whose mean over sequences is maximised; by default GSPO, at level "token" GRPO.

    `logprobs` are log π_θ of the response tokens and carry the gradient; `old_logprobs` are log π_old, and
    `sampler_logprobs` those of the engine that sampled. Advantages are one a sequence [B], or one a token [N] where the
    ratio is not the sequence's. Of padded tensors [B, T] with a mask of the response's tokens: new[mask], old[mask],
    advantages, mask.sum(1). Every response has at least one token; `lengths` on the CPU spare a wait for the GPU.
    `options` are fields of `SurrogateSettings`, such as name="dapo" or level="token": they change `settings`, or the
    published settings where none are given. `tokens_per_sequence` is what length_norm mean, group, turns and constant
    divide by; `weights` come from `correction_weights`. Raises ValueError for unknown names and for what does not fit.
    """
    settings = replace(settings, **options) if settings else SurrogateSettings.published(**options)
    tensors = {"logprobs": logprobs, "old_logprobs": old_logprobs}
    check_packed(lengths, **tensors, sampler_logprobs=sampler_logprobs, weights=weights)
    _check_advantages(settings, advantages, lengths, len(logprobs))
    lengths = lengths.to(logprobs.device, non_blocking=True)
    free = logprobs.view_as(logprobs)  # its gradient is masked below, without a hook on the caller's tensor
    sequences, by_token = sequence_of_token(lengths, len(logprobs)), settings.level != "sequence"
    units = Units(
        ratio=importance_ratio(free, old_logprobs, lengths, settings.level),
        logprobs=free if by_token else sequence_mean(free, lengths),
        advantages=advantages[sequences] if by_token and len(advantages) == len(lengths) else advantages,
        old_logprobs=old_logprobs,
        sampler_logprobs=sampler_logprobs,
        lengths=lengths,
    )
    terms, clipped = FORMS[PUBLISHED[settings.name].form](units, settings)
    if not by_token:  # a sequence's term stands at each of its tokens
        terms, clipped = terms[sequences], clipped[sequences]
    masked = torch.zeros_like(clipped) if weights is None else weights == 0
    if settings.opsm_delta is not None:
        masked = masked | _opsm(settings.opsm_delta, logprobs.detach(), sampler_logprobs, advantages, lengths)
    if free.requires_grad:  # 0, not the NaN that 0 times an infinite ratio is
        free.register_hook(lambda slope: slope.masked_fill(clipped | masked, 0.0))
    means = sequence_mean(torch.where(masked, 0.0, terms if weights is None else terms * weights), lengths)
    return Surrogate(
        per_sequence=means * _length_weight(settings.length_norm, lengths.to(means.dtype), tokens_per_sequence),
        clipped=clipped & ~masked,
        masked=masked,
        sequence_ratio=importance_ratio(logprobs.detach(), old_logprobs, lengths, "sequence"),
    )


def _check_advantages(
    settings: SurrogateSettings, advantages: Tensor, lengths: Int[Tensor, "B"], num_tokens: int
) -> None:
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError("a response without tokens has no likelihood")
    # GMPO weighs tokens, but its ratio is the whole sequence's.
    takes_tokens = settings.level != "sequence" and settings.name != "gmpo"
    if len(advantages) != len(lengths) and not (takes_tokens and len(advantages) == num_tokens):
        sizes = f"{len(advantages)} advantages do not fit {len(lengths)} sequences"
        raise ValueError(f"{settings.name}, level {settings.level}: {sizes}")


def _opsm(
    delta: float,
    logprobs: Float[Tensor, "N"],
    sampler_logprobs: Float[Tensor, "N"] | None,
    advantages: Float[Tensor, "N"] | Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
) -> Bool[Tensor, "N"]:
    """The tokens of sequences with Â < 0 and mean log(π_sampler/π_θ) > δ, which OPSM drops (DeepSeek-V3.2).

    The mean is the k1 estimate of KL(π_sampler‖π_θ) a token. DeepSeek-V3.2's π_old is the engine's policy.
    """
    if sampler_logprobs is None:
        raise ValueError("opsm_delta bounds how far π_θ is from the engine that sampled: it needs sampler_logprobs")
    by_sequence = advantages if len(advantages) == len(lengths) else sequence_mean(advantages, lengths)
    distance = sequence_mean(sampler_logprobs - logprobs, lengths)
    return ((by_sequence < 0) & (distance > delta))[sequence_of_token(lengths, len(logprobs))]


_DIVISORS = {"mean": "mini-batch's mean length", "group": "mean length in each sequence's group"}
_DIVISORS |= {"constant": "longest response there can be"}
_DIVISORS |= {"turns": "number of turns of each sequence times the mini-batch's mean length of a turn"}


def _length_weight(
    norm: LengthNorm, lengths: Float[Tensor, "B"], tokens_per_sequence: float | Float[Tensor, "B"] | None
) -> Float[Tensor, "B"] | float:
    """The factor that turns the mean over a sequence's tokens into their sum over the norm's divisor."""
    if norm in ("own", "none"):
        return 1.0 if norm == "own" else lengths
    if tokens_per_sequence is None:  # the mean of these sequences would depend on how the mini-batch is cut
        raise ValueError(f"length_norm {norm}: give tokens_per_sequence, the {_DIVISORS[norm]}")
    return lengths / tokens_per_sequence
