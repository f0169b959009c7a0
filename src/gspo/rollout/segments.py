"""The segments of a response: its text cut after each separator, and which of its tokens belong to which."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter

STRETCH = 64  # tokens: decoding a long response from its beginning, time and again, would be slow


def split_segments(text: str, separator: str) -> list[str]:
    """Cut a text after each occurrence of the separator; what follows the last one is a segment too.

    No text at all is one empty segment.
    """
    *ended, rest = text.split(separator)
    segments = [segment + separator for segment in ended]
    return segments if segments and not rest else [*segments, rest]


def segment_lengths(ids: Sequence[int], decode: Callable[[Sequence[int]], str], separator: str) -> tuple[int, ...]:
    """The number of tokens of each segment of the text that they decode to; 0 for one that begins and ends in a token.

    A token belongs to the segment in which the first character it adds lies; one that adds none, to the last so far.
    """
    text, num_tokens = decode(ids), len(ids)
    anchors = _anchors(ids, decode, text)

    @cache
    def kept(num: int) -> tuple[int, bool]:
        """How many characters of the text the first tokens make, and whether there are others that do not stay."""
        start, place = anchors[bisect_right(anchors, num, key=itemgetter(0)) - 1]
        part = decode(ids[start:num])
        size = len(part)
        while not text.startswith(part[:size], place):
            size -= 1
        return place + size, size < len(part)

    def length(num: int) -> int:
        """With a character that is begun and not complete, which may hide those of the same run of bytes before it."""
        size, begun = kept(num)
        return max(kept(before)[0] for before in range(max(num - 3, 0), num + 1)) + 1 if begun else size

    def adds(place: int) -> int:
        """The first token to add a character at the place or beyond it, found by halving: decoding takes time."""
        return bisect_right(range(1, num_tokens + 1), place, key=length)

    def first_token(place: int) -> int:
        token = adds(place)
        if token < num_tokens and length(token) < place:  # what it adds first lies in the segment before
            return adds(length(token + 1))
        return token

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
