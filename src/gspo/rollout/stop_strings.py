"""Where a response's text first contains a stop string: looked for as the tokens come."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from gspo.rollout.segments import Continuation

_MARGIN = 8  # characters: a text decoded from its middle may begin otherwise, with a space less or half a character


class StopStrings:
    """Responses under way, and after how many tokens those have ended whose text contains one of the strings."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt_of: Callable[[int], Sequence[int]]) -> None:
        self.ends: dict[int, int] = {}
        self._tokenizer = tokenizer
        self._decoder_of = cache(lambda response: Continuation(tokenizer, prompt_of(response)))
        self._strings = strings
        self._num_characters = max(map(len, strings), default=0) + _MARGIN
        self._written: defaultdict[int, list[int]] = defaultdict(list)
        self._may_complete = cache(self._has_last_character)

    def read(self, response: int, tokens: Sequence[int]) -> bool:
        """Take in a response's next tokens; whether it has ended."""
        written = self._written[response]
        for token in () if response in self.ends else tokens:
            written.append(token)
            if self._may_complete(token) and self._is_complete(written, self._decoder_of(response)):
                self.ends[response] = len(written)
                break
        return response in self.ends

    def _has_last_character(self, token: int) -> bool:
        """Whether a string can be complete with the token: most tokens are not looked at further."""
        text = self._tokenizer.decode([token, token])  # the second has what a tokenizer may take off a beginning
        return "\N{REPLACEMENT CHARACTER}" in text or any(string[-1] in text for string in self._strings)

    def _is_complete(self, written: Sequence[int], decode: Continuation) -> bool:
        """Whether the text contains a string; its last characters are decoded first, the whole where they have one."""
        size = self._num_characters  # in tokens at first: few of them have less than a character
        while len(text := decode(written[-size:])) < self._num_characters and size < len(written):
            size *= 2
        near = [string for string in self._strings if string in text]
        return any(string in decode(written) for string in near)
