"""How many characters of a response's text each of its tokens makes."""

from collections.abc import Callable, Sequence
from itertools import groupby

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to


class TokenText:
    """Knows each token's text; a tokenizer is asked for it once, for decoding takes time."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def lengths(self, ids: Sequence[int], text: str) -> list[int] | None:
        """The characters of each token; they add up to the text. None where the text is not the tokens', one by one.

        Of a character that is made by several tokens, the last has it.
        """
        for token in set(ids) - self._known.keys():
            self._text(token)
        pieces = [self._known[token] for token in ids]
        if "".join(pieces) == text and not any(_BROKEN in piece for piece in pieces):
            return [len(piece) for piece in pieces]
        found: list[int] = []
        for is_broken, run in groupby(ids, key=lambda token: _BROKEN in self._text(token)):
            part = list(run)
            found += self._together(part) if is_broken else [len(self._text(token)) for token in part]
        if sum(found) == len(text) + 1:  # a tokenizer that leaves out the space before the first word
            found[next(place for place, length in enumerate(found) if length)] -= 1
        return found if self._is(ids, found, text) else None

    def _text(self, token: int) -> str:
        """What a token adds to itself: within a text, where no tokenizer leaves out a space."""
        if token not in self._known:
            once, twice = self._decode([token]), self._decode([token, token])
            self._known[token] = twice[len(once) :] if _BROKEN not in twice else _BROKEN
        return self._known[token]

    def _together(self, ids: Sequence[int]) -> list[int]:
        """Parts of characters, one after another: each token has those that are whole with it and were not before."""
        found, whole = [], 0
        for end in range(1, len(ids) + 1):
            size = len(self._decode(ids[:end]).rstrip(_BROKEN)) if end < len(ids) else len(self._decode(ids))
            found.append(max(0, size - whole))
            whole = max(whole, size)
        return found

    def _is(self, ids: Sequence[int], lengths: Sequence[int], text: str) -> bool:
        """Whether the text, cut so, has each token's text in its place."""
        place = 0
        for token, length in zip(ids, lengths, strict=True):
            known = self._text(token)
            if _BROKEN not in known and not known.endswith(text[place : place + length]):
                return False
            place += length
        return place == len(text)
