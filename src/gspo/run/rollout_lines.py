"""The lines of rollouts/: each sample of a step with its texts, its scores, and numbers of each of its tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from math import isfinite, nan
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.types import Query, Sample

_MAX_COLUMN = 1000  # characters; a longer column is no answer to be read beside a response
_DIGITS = 4  # of a number of a token: clip ranges are of any size
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # a part of a character decodes to it


class TokenText:
    """Says how many characters of a response's text each of its tokens makes."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}  # of each token, for decoding takes time

    def lengths(self, ids: Sequence[int], text: str) -> list[int] | None:
        """The characters of each token; they add up to the text. None if the text is not that of the tokens in a row.

        A character that several tokens make belongs to the last of them.
        """
        for token in set(ids) - self._texts.keys():
            # A token's text is what it adds to itself, since a tokenizer may leave out a space before the first word.
            single, double = self._decode([token]), self._decode([token, token])
            self._texts[token] = double[len(single) :] if _BROKEN not in double else _BROKEN
        pieces = [self._texts[token] for token in ids]
        lengths: list[int] = []
        for is_broken, pairs in groupby(zip(ids, pieces, strict=True), key=lambda pair: _BROKEN in pair[1]):
            run = list(pairs)
            lengths += self._broken_lengths([token for token, _ in run]) if is_broken else [len(own) for _, own in run]
        if sum(lengths) == len(text) + 1:  # the tokenizer leaves out the space before the first word
            lengths[next(place for place, length in enumerate(lengths) if length)] -= 1
        ends = list(accumulate(lengths))
        fits = all(
            _BROKEN in piece or piece.endswith(text[end - length : end])
            for piece, length, end in zip(pieces, lengths, ends, strict=True)
        )
        return lengths if fits and sum(lengths) == len(text) else None

    def _broken_lengths(self, ids: Sequence[int]) -> list[int]:
        """The characters that become whole with each of some tokens that are parts of characters."""
        whole = [len(self._decode(ids[:end]).rstrip(_BROKEN)) for end in range(1, len(ids))]
        ends = list(accumulate([*whole, len(self._decode(ids))], max, initial=0))
        return [end - start for start, end in pairwise(ends)]


def rollout_lines(samples: Sequence[Sample], token_text: TokenText | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield a line for each sample; `token_text` adds the numbers of each token to it.

    Numbers of the update are null where the sample was not trained on, its advantage being 0.
    """
    log_ratios = _rounded({s: s.stats.log_ratios for s in samples if s.stats is not None and token_text})
    advantages = _rounded({s: s.token_advantages for s in samples if s.token_advantages is not None and token_text})
    for sample in samples:
        score, stats = sample.score, sample.stats
        line: dict[str, Any] = {
            "query": sample.query.id,
            "prompt": sample.query.text,
            "columns": _shown_columns(sample.query),
            "completion": sample.text,
            "reward": sample.reward,
            "rewards": dict(score.parts) if score else {},
            "failure": score.failure.message if score and score.failure else None,
            "advantage": sample.advantage,
            "sequence_ratio": stats and stats.sequence_ratio,
            "clipped": stats and stats.num_clipped / stats.num_tokens,
            "mini_batch": stats and stats.mini_batch,
            "tokens": sample.num_tokens,
            "finish_reason": sample.finish_reason,
            "policy_version": sample.versions[0][0],  # the oldest that wrote tokens of it
        }
        if token_text is not None:
            line |= {
                "token_characters": token_text.lengths(sample.token_ids.tolist(), sample.text),
                "token_log_ratios": log_ratios.get(sample),
                "token_advantages": advantages.get(sample),
            }
        yield line


def _shown_columns(query: Query) -> dict[str, Any]:
    """The data's other columns, such as the answer, as far as they are text, numbers or nothing, and not long."""
    return {
        name: value
        for name, value in query.columns.items()
        if value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) <= _MAX_COLUMN)
    }


def _rounded(numbers: Mapping[Sample, Float[Tensor, "W"]]) -> dict[Sample, list[float | None]]:
    """Rounded to significant digits, one entry for each of a sample's tokens.

    It is null for what is not finite and for tokens that the policy did not write. All samples are rounded at once,
    for one by one would take long.
    """
    if not numbers:
        return {}
    exact = torch.cat(list(numbers.values())).double()
    size = 10.0 ** (_DIGITS - 1 - exact.abs().clamp(min=1e-30).log10().floor())
    rounded = iter(((exact * size).round() / size).tolist())
    written = {sample: [next(rounded) if is_own else nan for is_own in sample.loss_mask.tolist()] for sample in numbers}
    return {sample: [value if isfinite(value) else None for value in row] for sample, row in written.items()}
