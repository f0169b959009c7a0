"""What the update sees of each sequence, brought to the CPU once a mini-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.objective import Surrogate
from gspo.types import Sample, SequenceStats


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """What a forward pass showed of its samples, still on its device: a GPU is waited for once a mini-batch."""

    samples: Sequence[Sample]
    by_token: Float[Tensor, "K N"]
    sequence_ratio: Float[Tensor, "B"]


def observe(
    samples: Sequence[Sample],
    result: Surrogate,
    logprobs: Float[Tensor, "N"],
    old: Float[Tensor, "N"],
    entropy: Float[Tensor, "N"],
    weights: Float[Tensor, "N"] | None,
) -> Observation:
    """Must come before the backward pass, whose graph it reads."""
    (slope,) = torch.autograd.grad(result.per_sequence.sum(), logprobs, retain_graph=True)
    log_ratio = logprobs.detach() - old
    ratio = log_ratio.exp()
    weights = torch.ones_like(ratio) if weights is None else weights
    summed = [result.clipped, result.masked, ratio, ratio**2, slope.abs(), weights, entropy.detach()]
    by_token = torch.stack([*summed, old, log_ratio])
    return Observation(samples=samples, by_token=by_token, sequence_ratio=result.sequence_ratio)


def sequence_stats(observations: Sequence[Observation], mini_batch: int) -> dict[Sample, SequenceStats]:
    """Of each sample that a mini-batch trained, in their order."""
    if not observations:
        return {}
    samples = [sample for observation in observations for sample in observation.samples]
    pieces = torch.cat([observation.by_token for observation in observations], dim=1).cpu()
    ratios = torch.cat([observation.sequence_ratio for observation in observations]).tolist()
    split = pieces.split([sample.num_written for sample in samples], dim=1)
    rows = zip(samples, ratios, split, strict=True)
    return {sample: _stats(piece, ratio, mini_batch) for sample, ratio, piece in rows}


def _stats(by_token: Float[Tensor, "K W"], sequence_ratio: float, mini_batch: int) -> SequenceStats:
    clipped, masked, ratio, square, slope, weight, entropy = by_token[:-2].double().sum(1).tolist()
    num_tokens = by_token.shape[1]
    return SequenceStats(
        mini_batch=mini_batch,
        num_tokens=num_tokens,
        num_clipped=int(clipped),
        num_masked=int(masked),
        sequence_ratio=sequence_ratio,
        ratio_sum=ratio,
        ratio_square_sum=square,
        gradient_weight=slope,
        correction_weight=weight / num_tokens,
        entropy_sum=entropy,
        old_logprobs=by_token[-2].clone(),
        log_ratios=by_token[-1].clone(),
    )
