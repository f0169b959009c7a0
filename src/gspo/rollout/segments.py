"""The text of a response and its segments: cut after each separator, with the tokens that belong to each."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

STRETCH = 64  # tokens: decoding a long response from its beginning, time and again, would be slow


def text_and_segments(ids: Sequence[int], tokenizer: Any, separator: str | None) -> tuple[str, tuple[int, ...]]:
    """A response's text without special tokens, and the lengths of its segments; none without a separator."""
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return decode(ids), () if separator is None else segment_lengths(ids, decode, separator)


def split_segments(text: str, separator: str) -> list[str]:
    """Cut a text after each occurrence of the separator; what follows the last one is a segment too.

    No text at all is one empty segment.
    """
    return re.findall(f".*?{re.escape(separator)}|.+", text, re.DOTALL) or [""]


def segment_lengths(ids: Sequence[int], decode: Callable[[Sequence[int]], str], separator: str) -> tuple[int, ...]:
    """The number of tokens of each segment of the text that they decode to; 0 for one that begins and ends in a token.

    A token belongs to the segment in which the first character it adds lies; one that adds none, to the last so far.
    """
    text, num_tokens = decode(ids), len(ids)
    anchors = _anchors(ids, decode, text)

    @cache
    def whole_characters(num: int) -> tuple[int, bool]:
        """How many characters of the text the first tokens make, and whether they make others that do not stay."""
        start, place = anchors[bisect_right(anchors, num, key=itemgetter(0)) - 1]
        part = decode(ids[start:num])
        size = len(part)
        while not text.startswith(part[:size], place):
            size -= 1
        return place + size, size < len(part)

    def characters(num: int) -> int:
        """With an incomplete character, which may hide complete ones before it in the same run of bytes."""
        size, is_cut = whole_characters(num)
        return max(whole_characters(before)[0] for before in range(max(num - 3, 0), num + 1)) + 1 if is_cut else size

    def first_token(place: int) -> int:
        """The first token whose own first character lies at the place or beyond it; halving spares decoding."""
        token = bisect_right(range(1, num_tokens + 1), place, key=characters)
        begins_before = token < num_tokens and characters(token) < place
        return first_token(characters(token + 1)) if begins_before else token

    *starts, _ = accumulate(map(len, split_segments(text, separator)))
    return tuple(after - first for first, after in pairwise([0, *map(first_token, starts), num_tokens]))


def _anchors(ids: Sequence[int], decode: Callable[[Sequence[int]], str], text: str) -> list[tuple[int, int]]:
    """Tokens from which the rest decodes as it does after all before it, with where their text begins.

    Where a tokenizer writes a beginning otherwise, or a stretch ends within a character, there is none.
    """
    anchors = [(0, 0)]
    for end in range(STRETCH, len(ids), STRETCH):
        start, place = anchors[-1]
        part = decode(ids[start:end])
        ahead = decode(ids[end : end + STRETCH]).rstrip("\N{REPLACEMENT CHARACTER}")  # it may end within one, too
        if ahead and text.startswith(part + ahead, place):
            anchors.append((end, place + len(part)))
    return anchors
