"""Drawing the next token of every row, with random numbers that belong to the prompt."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.engine.engine import Sampling

_BLOCK = 512  # tokens of a large vocabulary whose probabilities are added up before any single one is looked at
_LARGE = 4096


def sample_tokens(
    logits: Float[Tensor, "R V"],
    sampling: Sampling,
    uniform: Float[Tensor, "R"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    seen: Bool[Tensor, "R V"] | None = None,
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"], Float[Tensor, "R"] | None]:
    """A token a row, drawn with the row's number in [0, 1), log q of it and, where q is not π, log π of it.

    π is softmax(logits / temperature), and q what is drawn from: π as the sampling, `bias` and
    the penalty on the tokens `seen` change it. At temperature 0 the token is the likeliest of all, the first of equals,
    and has probability 1.
    """
    if sampling.temperature == 0:
        token = _changed(logits, sampling, bias, seen).argmax(-1)
        certain = logits.new_zeros(len(token))
        return token, certain, None if bias is None and seen is None else torch.full_like(certain, torch.nan)
    scores = _scores(logits, sampling)
    shaped = scores if bias is None and seen is None else _scores(_changed(logits, sampling, bias, seen), sampling)
    shaped = _truncate(shaped, sampling)
    token, total = _draw(shaped, uniform[:, None])
    place = token[:, None]
    logprob = shaped.gather(-1, place)[:, 0] - total.log()
    return token, logprob, None if shaped is scores else scores.gather(-1, place)[:, 0] - scores.logsumexp(-1)


def _scores(logits: Float[Tensor, "R V"], sampling: Sampling) -> Float[Tensor, "R V"]:
    scores = logits / sampling.temperature
    scores -= scores.amax(-1, keepdim=True)
    return scores


def _changed(
    logits: Float[Tensor, "R V"], sampling: Sampling, bias: Tensor | None, seen: Tensor | None
) -> Float[Tensor, "R V"]:
    """Logits with the bias, then with the penalty, as transformers has them."""
    logits, penalty = logits if bias is None else logits + bias, sampling.repetition_penalty
    if seen is None:
        return logits
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _draw(scores: Float[Tensor, "R V"], uniform: Float[Tensor, "R 1"]) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """A token a row with probability ∝ exp(score), and the sum of exp(score).

    The number finds the token among the cumulated probabilities; of a large vocabulary, first the block it is in: to
    cumulate all probabilities, or to draw noise for each, would cost more than a small model.
    """
    num_rows, vocabulary = scores.shape
    if vocabulary <= _LARGE:
        cumulated = scores.exp().cumsum(-1, dtype=torch.float64)
        token = _first_above(cumulated, uniform * cumulated[:, -1:])
        return token[:, 0], cumulated[:, -1].to(scores.dtype)
    num_blocks = -(-vocabulary // _BLOCK)
    weights = scores.new_zeros(num_rows, num_blocks * _BLOCK)
    torch.exp(scores, out=weights[:, :vocabulary])
    blocks = weights.view(num_rows, num_blocks, _BLOCK)
    # In float32 the small probabilities of a large vocabulary would be lost.
    sums = blocks.sum(-1).double()
    cumulated = sums.cumsum(-1)
    point = uniform * cumulated[:, -1:]
    block = _first_above(cumulated, point)
    rest = (point - (cumulated - sums).gather(-1, block)).clamp_(min=0)
    inside = blocks[torch.arange(num_rows, device=scores.device), block[:, 0]].double().cumsum(-1)
    token = (block * _BLOCK + _first_above(inside, rest)).clamp_(max=vocabulary - 1)
    return token[:, 0], cumulated[:, -1].to(scores.dtype)


def _first_above(cumulated: Float[Tensor, "R n"], point: Float[Tensor, "R 1"]) -> Int[Tensor, "R 1"]:
    """The first place whose cumulated weight is above the point, so that its own weight is above 0."""
    # Rounding may put the point at or beyond the end, where places of weight 0 could follow.
    point = torch.minimum(point, torch.nextafter(cumulated[:, -1:], torch.zeros_like(point)))
    # NaN is above everything; a run whose weights are broken is stopped with its reason, not here.
    return torch.searchsorted(cumulated, point, right=True).clamp_(max=cumulated.shape[-1] - 1)


def _truncate(scores: Float[Tensor, "R V"], sampling: Sampling) -> Float[Tensor, "R V"]:
    """-inf outside the top k tokens, then outside the smallest set of probability ≥ top_p, then below min_p.

    This is transformers' order; each takes what the one before it leaves as the whole distribution.
    """
    if 0 < sampling.top_k < scores.shape[-1]:
        threshold = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p  # the mass before the token already suffices
        outside = torch.zeros_like(outside).scatter(-1, order, outside)
        scores = scores.masked_fill(outside, -torch.inf)
    if sampling.min_p > 0:
        lowest = scores.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    return scores


def uniform_numbers(keys: Sequence[int], starts: Sequence[int], count: int) -> Float[Tensor, "R n"]:
    """Numbers in [0, 1) for `count` tokens of each response, of which `start` have theirs already."""
    rows = []
    for key, start in zip(keys, starts, strict=True):
        # One step of Philox's counter gives four numbers, so that no number before the start need be made.
        raw = np.random.Philox(key=key, counter=start // 4).random_raw(start % 4 + count)
        rows.append(raw[start % 4 :])
    return torch.from_numpy((np.stack(rows) >> np.uint64(11)) * 2.0**-53)
