"""The lines of rollouts/: each sample of a step with its texts, its scores, and numbers of each of its tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from math import isfinite, nan
from typing import Any

from jaxtyping import Float
from torch import Tensor

from gspo.types import Sample

_MAX_COLUMN = 1000  # characters; a longer column is no answer to be read beside a response
_DIGITS = 4  # significant ones, of a token's number: clip ranges are of any size
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
        for is_broken, group in groupby(zip(ids, pieces, strict=True), key=lambda pair: _BROKEN in pair[1]):
            tokens, texts = zip(*group, strict=True)
            lengths += self._broken_lengths(tokens) if is_broken else map(len, texts)
        if sum(lengths) == len(text) + 1:  # the tokenizer leaves out the space before the first word
            lengths[next(place for place, length in enumerate(lengths) if length)] -= 1
        ends = accumulate(lengths)
        own = [text[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        fits = all(_BROKEN in piece or piece.endswith(part) for piece, part in zip(pieces, own, strict=True))
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
    for sample in samples:
        score, stats = sample.score, sample.stats
        line: dict[str, Any] = {
            "query": sample.query.id,
            "prompt": sample.query.text,
            "columns": {name: value for name, value in sample.query.columns.items() if _is_shown(value)},
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
            line["token_characters"] = token_text.lengths(sample.token_ids.tolist(), sample.text)
            line["token_log_ratios"] = stats and _by_token(sample, stats.log_ratios)
            line["token_advantages"] = _by_token(sample, sample.token_advantages)
        yield line


def _is_shown(value: Any) -> bool:
    """Whether a column of the data, such as the answer, is text that is not long, a number or nothing."""
    return isinstance(value, int | float | None) or (isinstance(value, str) and len(value) <= _MAX_COLUMN)


def _by_token(sample: Sample, numbers: Float[Tensor, "W"] | None) -> list[float | None] | None:
    """The numbers of a sample's tokens; null for one that is not finite, or whose token the policy did not write."""
    if numbers is None:
        return None
    own = iter(numbers.tolist())
    values = [next(own) if is_written else nan for is_written in sample.loss_mask.tolist()]
    return [float(f"{value:.{_DIGITS}g}") if isfinite(value) else None for value in values]
