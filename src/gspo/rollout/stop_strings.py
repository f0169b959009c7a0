"""Where a response's text first contains a stop string: looked for as the tokens come."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from gspo.rollout.segments import Continuation

_MARGIN = 8  # characters: a text decoded from its middle may begin otherwise, with a space less or half a character


class StopStrings:
    """The strings, and which tokens can complete one of them."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        self.num_characters = max(map(len, strings), default=0) + _MARGIN
        self.may_complete = cache(self._has_last_character)

    def _has_last_character(self, token: int) -> bool:
        """Tell whether a string can be complete with the token: most tokens are not looked at further."""
        text = self.tokenizer.decode([token, token])  # the second has what a tokenizer may take off a beginning
        return "\N{REPLACEMENT CHARACTER}" in text or any(string[-1] in text for string in self.strings)


class WatchedResponse:
    """A response that is called with its tokens, one after the other, and says when it is complete."""

    def __init__(self, strings: StopStrings, prompt_ids: Sequence[int]) -> None:
        self.strings, self._prompt_ids = strings, prompt_ids
        self._decode: Continuation | None = None  # made when it is needed
        self.tokens: list[int] = []  # so far
        self.is_complete = False

    def __call__(self, token: int) -> bool:
        """Take in the next token; whether the text contains a stop string now."""
        self.tokens.append(token)
        self.is_complete = self.strings.may_complete(token) and self._contains_one()
        return self.is_complete

    def _contains_one(self) -> bool:
        """Whether the text contains a string; its last characters are decoded first, the whole where they have one."""
        self._decode = decode = self._decode or Continuation(self.strings.tokenizer, self._prompt_ids)
        size = self.strings.num_characters  # in tokens at first: few of them have less than a character
        while len(text := decode(self.tokens[-size:])) < self.strings.num_characters and size < len(self.tokens):
            size *= 2
        near = [string for string in self.strings.strings if string in text]
        return any(string in decode(self.tokens) for string in near)
