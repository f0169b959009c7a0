"""The text of a response and its segments: cut after each separator, with the tokens that belong to each."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

STRETCH = 64  # tokens: decoding a long response from its beginning, time and again, would be slow
_CONTEXT = 16  # tokens of a prompt, which say how its continuation begins: with a blank or without
_PARTIAL = "\N{REPLACEMENT CHARACTER}"  # a part of a character decodes to it


class Continuation:
    """Decodes tokens to what they add to the text of their prompt, special tokens included."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._decode, size = tokenizer.decode, _CONTEXT
        while (text := self._decode([*prompt_ids[-size:]])).startswith(_PARTIAL) and size < len(prompt_ids):
            size *= 2  # it begins within a character
        self._context, self._text = [*prompt_ids[-size:]], text

    def __call__(self, ids: Sequence[int]) -> str:
        """The text; that of the tokens alone where they change how the prompt itself is written."""
        whole: str = self._decode([*self._context, *ids])
        for text in (self._text, self._text.rstrip(_PARTIAL)):  # the tokens may complete its last character
            if whole.startswith(text):
                return whole[len(text) :]
        return str(self._decode([*ids]))


def text_and_segments(
    ids: Sequence[int], prompt_ids: Sequence[int], policy: Any, separator: str | None
) -> tuple[str, tuple[int, ...]]:
    """A response's text without the token that ends it, and the lengths of its segments; none without a separator.

    A stop token of ordinary text, such as a line's end, stays in the text, as a stop string does.
    """
    decode, num_ends = Continuation(policy.tokenizer, prompt_ids), int(_is_end(ids[-1], policy))
    body = ids[: len(ids) - num_ends]
    *lengths, last = (0,) if separator is None else segment_lengths(body, decode, separator)
    return decode(body), () if separator is None else (*lengths, last + num_ends)


def _is_end(token: int, policy: Any) -> bool:
    """Tell whether it is a stop token without text: a special one, or one that was added to the vocabulary."""
    tokenizer = policy.tokenizer
    return token in policy.stop_ids and (
        not tokenizer.decode([token], skip_special_tokens=True)  # the others are looked up in a list that can be long
        or tokenizer.convert_ids_to_tokens(token) in tokenizer.get_added_vocab()
    )


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
        """Return how many characters the first tokens make, and whether they make others that do not stay."""
        start, place = anchors[bisect_right(anchors, num, key=itemgetter(0)) - 1]
        part = decode(ids[start:num])
        size = len(part)
        while not text.startswith(part[:size], place):
            size -= 1
        return place + size, size < len(part)

    def characters(num: int) -> int:
        """Count with an incomplete character, which may hide complete ones before it in the same run of bytes."""
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
    """Return tokens from which the rest decodes as it does after all before it, with where their text begins.

    Where a tokenizer writes a beginning otherwise, or a stretch ends within a character, there is none.
    """
    anchors = [(0, 0)]
    for end in range(STRETCH, len(ids), STRETCH):
        start, place = anchors[-1]
        part = decode(ids[start:end])
        ahead = decode(ids[end : end + STRETCH]).rstrip(_PARTIAL)  # it may end within one, too
        if ahead and text.startswith(part + ahead, place):
            anchors.append((end, place + len(part)))
    return anchors
