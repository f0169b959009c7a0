"""A chat template, applied to messages, with the proof that what they say is in the prompt."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from os.path import commonprefix
from typing import Any

from gspo.errors import UserError
from gspo.types import Messages

_IS_BEGUN = "the last message is the assistant's, and the model goes on with it: a right answer goes into a column"
HOLE = "TEXTGSPO"  # the end of what stands for a message's text while a template is tried
_KINDS = (None, "text", "input_text", "output_text")  # of parts that are texts
_DIRECTIVES = ("%-d", "%-m", "%-H", "%-I", *(f"%{letter}" for letter in "aAbBcdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"))


def with_text(message: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The message with the parts of its content joined to one text; UserError for a part that is no text."""
    content, role = message.get("content"), message["role"]
    if content is None and role == "assistant":  # it may call tools
        content = ""
    parts: Any = [content] if isinstance(content, str | Mapping) or not isinstance(content, Iterable) else content
    text = ""
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        said = part.get("text") if isinstance(part, Mapping) and kind in _KINDS else part
        if not isinstance(said, str):
            what = f"the message of role {role!r} has as content {repr(kind or part)[:60]}, which is no text"
            raise UserError(what, where=where, fix="only texts reach the model: write it as a text, or leave it out")
        text += said
    return {key: value for key, value in message.items() if value is not None} | {"content": text}


class ChatTemplate:
    """The template of a tokenizer, which writes the recipe's date wherever it would write today's."""

    def __init__(self, tokenizer: Any, day: str) -> None:
        self._tokenizer, self._day = tokenizer, date.fromisoformat(day)
        self._frames: dict[str, tuple[str, str, bool]] = {}

    def frame(self, messages: Messages, variables: Mapping[str, Any], *, where: str) -> tuple[str, str, bool]:
        """Return what it writes around the texts of messages, proven once for each shape of them.

        Then what it puts before an answer that has been begun though not before one that is to come, such as closed
        thoughts, and whether it writes a date. UserError where it does not write each text once and in its place.
        """
        *earlier, last = messages
        is_begun = last["role"] == "assistant"
        holes = [f"GSPO{n}{HOLE}" if m["content"] or (m is last and is_begun) else "" for n, m in enumerate(messages)]
        tried = [{**message, "content": hole} for message, hole in zip(messages, holes, strict=True)]
        key = json.dumps([tried, variables], default=str)
        if key not in self._frames:
            text, block = self._write(tried, variables, where), ""
            _prove(text, holes, messages, where, is_row=False)
            if is_begun and earlier:
                header, tried = text.partition(holes[-1])[0], tried[:-1]
                text = self._write(tried, variables, where)
                rest = header[len(commonprefix([text, header])) :]  # noqa: RUF071 - characters are meant
                opens = text != self._write(tried, variables, where, opens=False)
                block = rest if opens and rest.strip() and len(last) == 2 else ""
            is_dated = text != self._write(tried, variables, where, days=40)
            self._frames[key] = text, block, is_dated
        return self._frames[key]

    def prompt(self, messages: Messages, variables: Mapping[str, Any], *, where: str) -> tuple[str, list[str]]:
        """The prompt, and remarks on what it lacks of the messages; UserError where that is what one of them says.

        An answer that has been begun follows the header as it is.
        """
        *earlier, last = messages
        if last["role"] != "assistant":
            text = self._write(messages, variables, where)
            return text, _prove(_squeezed(text), [_squeezed(m["content"]) for m in messages], messages, where)
        text = self._write([*earlier, {**last, "content": HOLE}], variables, where).partition(HOLE)[0]
        text = text.removesuffix(self.frame(messages, variables, where=where)[1])
        remarks = _prove(_squeezed(text), [*(_squeezed(m["content"]) for m in earlier), ""], messages, where)
        return text + last["content"], [*remarks, _IS_BEGUN]

    def around_a_question(self, variables: Mapping[str, Any]) -> tuple[str, str]:
        """Return what it writes before and behind a prompt's only message."""
        before, _, behind = self._write([{"role": "user", "content": HOLE}], variables, "").rpartition(HOLE)
        return before, behind

    def between(
        self, num_results: int, variables: Mapping[str, Any], roles: Sequence[str] = ("tool", "user")
    ) -> tuple[str, list[str]]:
        """The role under which it writes results of tools, and what it writes behind an answer and around each of them.

        The last piece ends with what it writes before the next answer. UserError where it takes results under no role.
        """
        for role in roles:
            num_messages = num_results if role == "tool" else 1  # where roles must take turns
            # Some write a result as JSON: what is in quotes comes back as it is, or the role is not for plain texts.
            said = [f"GSPO{n}{HOLE}" if n < 2 else f'GSPO{n} "\n{HOLE}' for n in range(2 + num_messages)]
            speakers = ["user", "assistant", *[role] * num_messages]
            messages = [{"role": speaker, "content": text} for speaker, text in zip(speakers, said, strict=True)]
            with suppress(UserError):
                text = self._write(messages, variables, "")
                if re.fullmatch(".*".join(map(re.escape, ["", *said, ""])), text, re.DOTALL):
                    return role, re.split("|".join(map(re.escape, said[1:])), text)[1:]
        what = "the chat template writes results of tools neither as messages of the role tool nor as the user's"
        raise UserError(what, where="rollout.tools", fix="use a tokenizer with another template, or leave tools out")

    def _write(
        self, messages: Messages, variables: Mapping[str, Any], where: str, *, opens: bool = True, days: int = 0
    ) -> str:
        options = {**variables, "continue_final_message": False, "tokenize": False}
        options["add_generation_prompt"] = opens and messages[-1]["role"] != "assistant"
        try:
            template = options.get("chat_template") or self._tokenizer.get_chat_template(tools=options.get("tools"))
            if "strftime_now" in template:
                options["chat_template"] = _dated(template, self._day + timedelta(days))
            return str(self._tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # a template's own complaints come as jinja2 errors of many kinds
            raise UserError(f"the chat template refuses the messages: {error}", where=where) from None


def _dated(template: str, day: date) -> str:
    """The template with a `strftime_now` of its own, of midnight on that day: transformers' asks the clock."""
    swaps = "".join(f"|replace({directive!r}, {day.strftime(directive)!r})" for directive in _DIRECTIVES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{swaps} }}}}{{% endmacro %}}\n{template}"


def _prove(prompt: str, texts: Sequence[str], messages: Messages, where: str, *, is_row: bool = True) -> list[str]:
    """Find the texts in the prompt, each behind the last, and once where they are unlike anything else; UserError.

    A template may repeat what is the system's, or put it before the last question. Of earlier answers it may leave out
    thoughts, which is a remark.
    """
    place, remarks = 0, list[str]()
    for text, message in zip(texts, messages, strict=True):
        is_system = message["role"] in ("system", "developer")
        found = prompt.find(text, 0 if is_system else place)
        if is_row and found < 0 and message["role"] == "assistant":
            remarks.append("the chat template leaves out a part of an earlier answer, such as its thoughts")
        elif found < 0 or not (is_row or is_system or prompt.count(text) == 1 or not text):
            what = f"the chat template does not write, once and in its place, the text of role {message['role']!r}"
            fix = "use a role that the template knows, or another template; or put the text into another message"
            raise UserError(f"{what}: {message['content'][:80]!r}", where=where, fix=fix)
        elif not is_system:
            place = found + len(text)
        others = {key: value for key, value in message.items() if key != "content" and isinstance(value, str)}
        left_out = [key for key, value in others.items() if " " in value and _squeezed(value) not in prompt]
        remarks += [f"the chat template leaves out {key!r} of a message" for key in left_out]
    return remarks


def _squeezed(text: str) -> str:
    """The text without blanks and switches such as /no_think, which templates take away."""
    return "".join(re.sub(r"(?<!\S)/\w+(?!\S)", "", text).split())
