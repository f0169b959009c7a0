"""An objective put together: a ratio of some level, the form of the term, and what divides a sequence's sum."""

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objective.ratio import check_packed, sequence_mean, sequence_of_token, sequence_ratio
from gspo.objective.terms import FORMS, Bounds, Units
from gspo.recipe.published import LEVELS, ONLY, PUBLISHED, LengthNorm, Level, Name


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """What an objective says of B sequences with N packed response tokens."""

    per_sequence: Float[Tensor, "B"]  # the term under 1/G Σ_i, to be maximised
    clipped: Bool[Tensor, "N"]  # the token takes no part in the gradient because of clipping
    masked: Bool[Tensor, "N"]  # nor because a correction or OPSM has dropped it
    sequence_ratio: Float[Tensor, "B"]  # s_i, detached; whatever the level


def surrogate(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"] | Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    level: Level | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    *,
    name: Name = "clip",
    length_norm: LengthNorm | None = None,
    tokens_per_sequence: float | Float[Tensor, "B"] | None = None,
    dual_clip: float = 3.0,
    minirl_cap: float = 5.0,
    sapo_temperature: tuple[float, float] = (1.0, 1.05),
    sampler_logprobs: Float[Tensor, "N"] | None = None,
    weights: Float[Tensor, "N"] | None = None,
    opsm_delta: float | None = None,
) -> Surrogate:
    """A published objective by name; its mean over sequences is maximised. `clip` is GSPO, at level token GRPO.

    `logprobs` are log π_θ of the response tokens and carry the gradient; `old_logprobs` log π_old. Advantages are one a
    sequence [B], or, unless the ratio is the sequence's, one a token [N]. Every response has at least one token. What
    is not given is as published. `tokens_per_sequence` is what length_norm mean, group and constant divide by;
    `weights` come from a correction; `opsm_delta` drops sequences of Â < 0 with mean log(π_sampler/π_θ) above it
    (DeepSeek-V3.2, whose π_old is the engine's). Lengths may lie on the CPU: a GPU is then not waited for. Raises
    ValueError for unknown names and for what does not fit.
    """
    if name not in PUBLISHED:
        raise ValueError(f"unknown surrogate {name!r}: {', '.join(PUBLISHED)}")
    published = PUBLISHED[name]
    level, length_norm = level or published.level, length_norm or published.length_norm
    given = {"sampler_logprobs": sampler_logprobs, "weights": weights}
    known = {name: tensor for name, tensor in given.items() if tensor is not None}
    check_packed(lengths, logprobs=logprobs, old_logprobs=old_logprobs, **known)
    _check(name, level, length_norm, advantages, lengths, len(logprobs))
    lengths = lengths.to(logprobs.device, non_blocking=True)
    low, high = published.range(level)
    low, high = (low if clip_low is None else clip_low), (high if clip_high is None else clip_high)
    bounds = Bounds(low=low, high=high, dual=dual_clip, cap=minirl_cap, temperature=sapo_temperature)
    masked = _masked(logprobs, sampler_logprobs, advantages, lengths, weights, opsm_delta)
    free = logprobs.view_as(logprobs)
    units = _units(level, free, old_logprobs, advantages, lengths, sampler_logprobs)
    terms, clipped = FORMS[published.form](units, bounds)
    if level == "sequence":  # its term stands at each of its tokens
        sequences = sequence_of_token(lengths, len(logprobs))
        terms, clipped = terms[sequences], clipped[sequences]
    if free.requires_grad:  # 0, not the NaN that 0 times an infinite ratio is
        free.register_hook(lambda slope: slope.masked_fill(clipped | masked, 0.0))
    weighted = terms if weights is None else terms * weights
    means = sequence_mean(torch.where(masked, 0.0, weighted), lengths)
    length_weight = _length_weight(length_norm, lengths.to(means.dtype), tokens_per_sequence)
    return Surrogate(
        per_sequence=means * length_weight,
        clipped=clipped & ~masked,
        masked=masked,
        sequence_ratio=sequence_ratio(logprobs.detach(), old_logprobs, lengths),
    )


def _check(
    name: Name, level: str, length_norm: str, advantages: Tensor, lengths: Int[Tensor, "B"], num_tokens: int
) -> None:
    published = PUBLISHED[name]
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}: token, sequence or sequence_token")
    if level not in published.levels:
        raise ValueError(f"{name} has no level {level}: {ONLY[name]}")
    if length_norm not in get_args(LengthNorm):
        raise ValueError(f"unknown length_norm {length_norm!r}: {', '.join(get_args(LengthNorm))}")
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError("a response without tokens has no likelihood")
    takes_tokens = level != "sequence" and published.form != "gmpo"  # whose ratio is of the whole sequence, too
    if len(advantages) != len(lengths) and not (takes_tokens and len(advantages) == num_tokens):
        raise ValueError(f"{name}, level {level}: {len(advantages)} advantages do not fit {len(lengths)} sequences")


def _units(
    level: Level,
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"] | Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    sampler_logprobs: Float[Tensor, "N"] | None,
) -> Units:
    if level == "sequence":  # s_i, Eq. 8
        return Units(
            ratio=sequence_ratio(logprobs, old_logprobs, lengths),
            logprobs=sequence_mean(logprobs, lengths),
            old_logprobs=sequence_mean(old_logprobs, lengths),
            sampler_logprobs=None,
            advantages=advantages,
            lengths=lengths,
        )
    sequences = sequence_of_token(lengths, len(logprobs))
    if level == "sequence_token":  # s_{i,t} = sg[s_i] · π_θ/sg[π_θ], Eq. 15
        s = sequence_ratio(logprobs, old_logprobs, lengths).detach()
        ratio = s[sequences] * (logprobs - logprobs.detach()).exp()
    else:
        ratio = (logprobs - old_logprobs).exp()
    return Units(
        ratio=ratio,
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        sampler_logprobs=sampler_logprobs,
        advantages=advantages if len(advantages) == len(logprobs) else advantages[sequences],
        lengths=lengths,
    )


def _masked(
    logprobs: Float[Tensor, "N"],
    sampler_logprobs: Float[Tensor, "N"] | None,
    advantages: Float[Tensor, "N"] | Float[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    weights: Float[Tensor, "N"] | None,
    opsm_delta: float | None,
) -> Bool[Tensor, "N"]:
    """The tokens that a correction weighs 0, and those of the sequences that OPSM drops."""
    masked = torch.zeros(len(logprobs), dtype=torch.bool, device=logprobs.device)
    if weights is not None:
        masked |= weights == 0
    if opsm_delta is not None:
        if sampler_logprobs is None:
            raise ValueError("opsm_delta bounds how far π_θ is from the engine that sampled: it needs sampler_logprobs")
        by_sequence = advantages if len(advantages) == len(lengths) else sequence_mean(advantages, lengths)
        gone = sequence_mean(sampler_logprobs - logprobs.detach(), lengths)  # k1 estimate of KL(π_sampler‖π_θ), a token
        masked |= ((by_sequence < 0) & (gone > opsm_delta))[sequence_of_token(lengths, len(logprobs))]
    return masked


_DIVISORS = {
    "mean": "the mini-batch's mean length",
    "group": "the mean length in each sequence's group",
    "constant": "the longest response there can be",
}


def _length_weight(
    norm: LengthNorm, lengths: Float[Tensor, "B"], tokens_per_sequence: float | Float[Tensor, "B"] | None
) -> Float[Tensor, "B"] | float:
    """What turns the mean over a sequence's tokens into their sum over the norm's divisor."""
    if norm == "own":
        return 1.0
    if norm == "none":
        return lengths
    if tokens_per_sequence is None:  # nothing divides by what it happens to hold
        raise ValueError(f"length_norm {norm}: give tokens_per_sequence, {_DIVISORS[norm]}")
    return lengths / tokens_per_sequence
