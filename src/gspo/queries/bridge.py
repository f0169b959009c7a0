"""The tokens between two turns of the policy: what tools or an environment say, as the chat template writes it."""

import json
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import Any, Literal

from gspo.errors import UserError
from gspo.queries.render import CUT, cut, special_tokens
from gspo.queries.template import HOLE, ChatTemplate, with_text
from gspo.recipe.sections import QueriesConfig
from gspo.types import Messages

_BEFORE, _AFTER = "\n<tool_response>\n", "\n</tool_response>\n"  # where there is no template, and around texts of users
PLAIN = f"<tool_call></tool_call>{_BEFORE}{_AFTER}"  # what a tokenizer without a template must be able to write


class Bridge:
    """The text between two turns of the policy: encoded by itself, so that all before it stays as it was sampled.

    It has results of tools or, `as_user`, what the user says next. Without a chat template that follows as it is.
    Example: Bridge(tokenizer, recipe.queries).tokens(["56088"], last=2)
    """

    def __init__(
        self,
        tokenizer: Any,
        queries: QueriesConfig,
        schemas: Sequence[Mapping[str, Any]] = (),
        *,
        as_user: bool = False,
    ) -> None:
        has_template = bool(getattr(tokenizer, "chat_template", None)) and queries.chat is not False
        self.tokenizer, self._template = tokenizer, ChatTemplate(tokenizer, queries.date) if has_template else None
        self._schemas = {"tools": [*schemas]} if schemas and has_template else {}
        self._variables = queries.chat_template_kwargs | self._schemas
        self._writes_calls = "tool_calls" in str(getattr(tokenizer, "chat_template", None))
        self.speaker: Literal["user", "tool"] = "user" if as_user else "tool"
        roles = ("user",) if as_user else ("tool", "user")
        self._around = cache(self._written_around)
        self.role = self._template.between(2, self._variables, roles)[0] if self._template else None  # None: plain text

    @property
    def call_ends_turn(self) -> bool:
        """Tell whether a call ends a turn, and no token, but in the last."""
        return self.role is None and self.speaker == "tool"

    def shown(self, queries: QueriesConfig) -> QueriesConfig:
        """Return what renders queries, with the schemas of tools for a chat template."""
        return queries.model_copy(update={"chat_template_kwargs": queries.chat_template_kwargs | self._schemas})

    @property
    def opened(self) -> list[int]:
        """The tokens behind a prompt's last message, with which the policy's turn begins; none without a template."""
        text = self.opened_text
        return self._encoded_behind("", text) if text else []

    def opening(self, said: str) -> list[int]:
        """The tokens that append a text to a prompt whose last message is still open, and `opened` behind it."""
        return [*self._encoded_behind("", self._cut(said)), *self.opened]

    def pieces(self, results: Sequence[str]) -> list[str]:
        """The texts of results with what stands around each; the first of the list is written behind an answer."""
        around = self._around(len(results))
        return [around[0], *(piece for pair in zip(results, around[1:], strict=True) for piece in pair)]

    def _written_around(self, num_results: int) -> list[str]:
        between = [_AFTER + _BEFORE] * (num_results - 1)
        if self._template is not None and self.role == "tool":
            return self._template.between(num_results, self._variables, roles=("tool",))[1]
        if self._template is not None:
            first, last = self._template.between(1, self._variables, roles=("user",))[1]
            if self.speaker == "user":
                return [first, *["\n\n"] * (num_results - 1), last]
            return [first + _BEFORE.lstrip(), *between, _AFTER.rstrip() + last]
        return [""] * (num_results + 1) if self.speaker == "user" else [_BEFORE, *between, _AFTER]

    def tokens(self, results: Sequence[str], *, last: int) -> list[int]:
        """The tokens that follow `last`, with which the policy's turn has ended; results are plain text throughout.

        Written as the user's, several are one message.
        """
        return self.encoded(self.marked(results, last=last), self.tokenizer.decode([last]))

    def marked(self, results: Sequence[str], *, last: int) -> str:
        """The text of `tokens`, with marks as in that of `rendered`."""
        pieces = self.pieces(results)
        pieces[0] = pieces[0].removeprefix(self.tokenizer.decode([last]))  # the policy has written it
        for place in range(1, len(pieces), 2):
            pieces[place] = self._cut(pieces[place])
        return "".join(pieces)

    @property
    def opened_text(self) -> str | None:
        """The text behind a prompt's last message, with which the policy's turn begins; None without a template."""
        return self._around_a_question[1] if self._template else None

    @cached_property
    def _around_a_question(self) -> tuple[str, str]:
        assert self._template is not None
        return self._template.around_a_question(self._variables)

    def again(self, turns: Sequence[tuple[str, Sequence[str]]]) -> str | None:
        """The text behind a prompt's last message, as the template writes turns of the policy with what followed each.

        It has marks, as that of `rendered`. None without a template, and where it refuses what the policy wrote or
        moves what stands before the question, such as schemas of tools, to a later one: a prompt that is kept has it.
        """
        if self._template is None:
            return None
        messages: Messages = [{"role": "user", "content": HOLE}]
        for turn, results in turns:
            messages += [{"role": "assistant", "content": turn}, *self._messages(results)]
        with suppress(UserError):
            before, _, behind = self._template.prompt(messages, self._variables, where="")[0].partition(HOLE)
            return behind if before == self._around_a_question[0] else None
        return None

    def rewrites(self, turn: str) -> bool:
        """Tell whether the template writes a turn in another way once another has followed it."""
        again = self.again([(turn, ["GSPO"])])
        return again is not None and not again.startswith(f"{self.opened_text}{turn}")

    def written_again(self, prompt_ids: Sequence[int], marked: str) -> list[int]:
        """The tokens of a prompt and of a text of `again` behind it, which may begin otherwise than `opened_text`."""
        opened, decode, kept = self.opened_text or "", self.tokenizer.decode, len(prompt_ids)
        if marked.startswith(opened):
            marked = marked.removeprefix(opened)
        else:
            while not (end := decode([*prompt_ids[kept:]])).endswith(opened) and kept:
                kept -= 1
            marked = end.removesuffix(opened) + marked
        return [*prompt_ids[:kept], *self.encoded(marked, decode([*prompt_ids[kept - 1 : kept]]))]

    def _messages(self, results: Sequence[str]) -> Messages:
        """Results as the messages that `pieces` writes."""
        texts = [self._cut(result) for result in results]
        if self.role == "tool":
            return [{"role": "tool", "content": text} for text in texts]
        if self.speaker == "user":
            return [{"role": "user", "content": "\n\n".join(texts)}]
        return [{"role": "user", "content": _BEFORE.lstrip() + (_AFTER + _BEFORE).join(texts) + _AFTER.rstrip()}]

    def rendered(self, messages: Messages, schemas: Sequence[Mapping[str, Any]], own_texts: Container[str] = ()) -> str:
        """The text of a conversation up to the policy's next turn; UserError for messages that the template leaves out.

        All but the policy's own texts has a mark in each special token, across which `encoded` reads none.
        """
        assert self._template is not None  # `role` says so
        own = [with_text(message, where="messages") for message in messages]
        for message in own:
            if message["role"] != "assistant" or message["content"] not in own_texts:
                message["content"] = self._cut(message["content"])
            if calls := self._cut_within(message.pop("tool_calls", None)):
                if self._writes_calls:
                    message["tool_calls"] = calls
                else:
                    message["content"] += "".join(map(_written, calls))
        variables = self._variables | ({"tools": self._cut_within([*schemas])} if schemas else {})
        return self._template.prompt(own, variables, where="messages")[0]

    def encoded(self, marked: str, end: str | None = None) -> list[int]:
        """The tokens of a text of `rendered`, or of what follows in it behind a token that is written `end`."""
        if end is not None:
            return self._encoded_behind(end, marked)
        return [token for piece in marked.split(CUT) for token in self._encoded(piece)]

    def _cut_within(self, value: Any) -> Any:
        """The value with all texts in it cut."""
        if isinstance(value, str):
            return self._cut(value)
        if isinstance(value, Mapping):
            return {self._cut(name): self._cut_within(own) for name, own in value.items()}
        return [self._cut_within(own) for own in value] if isinstance(value, list | tuple) else value

    def _cut(self, text: str) -> str:
        return cut(self._special, text)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return special_tokens(self.tokenizer, "".join(self.tokenizer.get_added_vocab()))

    def _encoded_behind(self, end: str, text: str) -> list[int]:
        """Encode a text as it is encoded behind another, where that stays the same: a tokenizer may begin one anew."""
        first, *rest = text.split(CUT)
        before, both = self._encoded(f"a{end}"), self._encoded(f"a{end}{first}")
        ids = both[len(before) :] if both[: len(before)] == before else self._encoded(first)
        return [*ids, *(token for piece in rest for token in self._encoded(piece))]

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _written(call: Mapping[str, Any]) -> str:
    """The text of a call, where a template has none for it."""
    said = {name: call["function"][name] for name in ("name", "arguments")}
    return f"<tool_call>{json.dumps(said, ensure_ascii=False)}</tool_call>"
