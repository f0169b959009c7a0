"""From rows to queries: the chat template or plain text, then tokens."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.queries.template import HOLE, ChatTemplate, with_text
from gspo.recipe.sections import QueriesConfig
from gspo.types import Messages, Query

CUT = "\ufdd0\ufdd1"  # no characters: within a special token that is to be plain text
NO_TOOLS = "the tokenizer's chat template shows the model no tools"
_PLACE = re.compile(r"<\|?(?:image|video|audio)[\w-]*\|?>", re.IGNORECASE)
_MEDIA = re.compile("image|picture|photo|video|audio|sound|speech", re.IGNORECASE)
_IS_TEMPLATED = (
    "the text has what the chat template writes before an answer: if it is templated already, it is now twice "
    "(queries.chat: false leaves texts as they are)"
)
_ARGUMENTS = "chat_template_kwargs"  # of the recipe's queries, and a row's column, as TRL has it


def render_all(rows: Sequence[Row], tokenizer: Any, *, queries: QueriesConfig) -> tuple[Query, ...]:
    """The rows as the model reads them; `tokenizer` is a transformers tokenizer.

    Raises UserError naming the row: messages without a chat template or that it leaves out, no tokens.
    """
    if not rows:
        return ()
    has_template = bool(getattr(tokenizer, "chat_template", None))
    # Of every row: chat messages are refused where the template is not applied.
    is_chat = has_template if queries.chat is None else queries.chat
    for row in rows:
        _check_row(row, queries, is_chat=is_chat, has_template=has_template)
    template = ChatTemplate(tokenizer, queries.date) if is_chat else None
    tokens = cache(partial(special_tokens, tokenizer))
    written = [_written(row, queries, template, tokens) for row in rows]
    # A chat template has written its special tokens itself.
    encoded = tokenizer([pieces[0] for pieces, _ in written], add_special_tokens=not is_chat)["input_ids"]
    first, special, rendered = tokenizer.bos_token_id, {*tokenizer.all_special_ids}, []
    begins = first is not None and tokenizer("a")["input_ids"][:1] == [first]
    for row, (pieces, remarks), ids in zip(rows, written, encoded, strict=True):
        # Some tokenizers end every text with their end token, after which a model has nothing to say.
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not pieces[0].endswith(tokenizer.eos_token):
            ids = ids[:-1]
        if begins and ids[:1] != [first]:
            remarks.append(f"the tokenizer begins texts with {tokenizer.bos_token}, and the chat template does not")
        rest = [token for piece in pieces[1:] for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
        prompt_ids = (*ids[begins and ids[:2] == [first, first] :], *rest)  # the text may have the first one, too
        text = "".join(pieces)
        made = Query(
            id=row.id,
            prompt=row.prompt,
            text=text,
            prompt_ids=prompt_ids,
            columns=row.clean_columns,
            source=row.source,
            remarks=tuple(dict.fromkeys(remarks)),
        )
        rendered.append(made)
        # Of a text of characters that it lacks, a tokenizer makes no token but those that it adds.
        are_added = special.issuperset(prompt_ids) and not tokenizer(text, add_special_tokens=False)["input_ids"]
        if are_added or not text.strip():
            fix = "remove the row, or name the right column in queries.prompt"
            raise UserError("the prompt is empty, or none of it is a token", where=row.id, fix=fix)
    return tuple(rendered)


def variable_notes(queries: Sequence[Query], tokenizer: Any, settings: QueriesConfig) -> list[str]:
    """Notes on variables that the chat template does not mention, and would ignore."""
    names = dict.fromkeys(name for query in queries for name in _arguments(query, settings))
    template = str(getattr(tokenizer, "chat_template", None))
    unknown = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]
    note = f"{_ARGUMENTS}: the tokenizer's chat template has no variable "
    untold = f"{NO_TOOLS}: describe rollout.tools in queries.system"
    return [untold if name == "tools" else f"{note}{name}" for name in unknown]


def remark_notes(queries: Sequence[Query], name: str) -> list[str]:
    """The remarks on the prompts, each with how many have it."""
    counts = Counter(remark for query in queries for remark in query.remarks)
    return [f"{count:,} of {len(queries):,} {name}: {remark}" for remark, count in counts.items()]


def _arguments(row: Row | Query, queries: QueriesConfig) -> dict[str, Any]:
    """The recipe's variables of the chat template and the row's, which win; UserError for what are none."""
    variables = row.columns.get(_ARGUMENTS)
    if variables is not None and not (
        isinstance(variables, Mapping) and all(isinstance(name, str) for name in variables)
    ):
        fix = "write a mapping of the template's variables, {enable_thinking: false}"
        raise UserError(f"column {_ARGUMENTS!r} holds {str(variables)[:60]!r}, not a mapping", where=row.id, fix=fix)
    # In Parquet every row has every name, without a value where the row has none.
    return queries.chat_template_kwargs | {
        name: value for name, value in (variables or {}).items() if value is not None
    }


def _check_row(row: Row, queries: QueriesConfig, *, is_chat: bool, has_template: bool) -> None:
    """Raise UserError where row, tokenizer and settings do not go together."""
    is_messages = not isinstance(row.prompt, str)
    has_system = not isinstance(row.prompt, str) and row.prompt[0]["role"] == "system"
    reason = "the prompt is chat messages" if is_messages else "queries.chat is true"
    instruct = "use an instruct model's tokenizer (model.tokenizer), or give prompts as text"
    template, system = queries.template is not None, queries.system is not None
    refusals = (
        (is_messages and queries.chat is False, f"{reason}, and queries.chat is false", "remove queries.chat"),
        ((is_messages or is_chat) and not has_template, f"{reason}, and the tokenizer has no chat template", instruct),
        (template and is_messages, f"{reason}, and queries.template is for text", "remove queries.template"),
        (system and has_system, "the prompt has a system message already", "remove queries.system"),
        (system and not is_chat, "queries.system needs a chat template", "put the text into queries.template"),
        (queries.chat_template_kwargs and not is_chat, f"queries.{_ARGUMENTS} needs a chat template", "leave it out"),
    )
    for is_refused, what, fix in refusals:
        if is_refused:
            raise UserError(what, where=row.id, fix=fix)


def _written(
    row: Row, queries: QueriesConfig, template: ChatTemplate | None, tokens: Callable[[str], re.Pattern[str]]
) -> tuple[list[str], list[str]]:
    """The prompt, in pieces across whose borders no special token is read, and remarks on it."""
    prompt: Any = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    own, variables = [with_text(message, where=row.id) for message in prompt], _arguments(row, queries)
    with_settings = partial(_with_settings, queries=queries, is_text=isinstance(row.prompt, str))
    framed = template.frame(with_settings(own), variables, where=row.id) if template else ("", "", False)
    special, closing, remarks = tokens(framed[0]), framed[0].rpartition(HOLE)[2].strip(), _media(row, own)
    if framed[2]:
        remarks.append(f"the chat template writes a date, which is {queries.date} on every day (queries.date)")
    for message in own[: -1 if own[-1]["role"] == "assistant" else None]:
        text, way = message["content"], queries.special_tokens
        if closing and closing in text:
            remarks.append(_IS_TEMPLATED)
        if found := special.search(text):
            if way == "refuse":
                fix = "take it out, or set queries.special_tokens: text, which encodes it as plain text, or allow"
                raise UserError(f"the row's own text has the special token {found[0]}", where=row.id, fix=fix)
            if way == "text":
                message["content"] = cut(special, text)
            how = "plain text" if way == "text" else "a token (queries.special_tokens: text makes it plain text)"
            remarks.append(f"the row's own text has {found[0]}, which is read as {how}")
    if template is None:
        return with_settings(own)[0]["content"].split(CUT), remarks
    text, others = template.prompt(with_settings(own), variables, where=row.id)
    return text.split(CUT), [*remarks, *others]


def _with_settings(messages: Messages, queries: QueriesConfig, is_text: bool) -> Messages:
    """The messages with the recipe's own texts."""
    if is_text and queries.template is not None:
        # Not str.format: braces in the prompt or elsewhere in the template are text.
        messages = [{"role": "user", "content": queries.template.replace("{prompt}", messages[0]["content"])}]
    return messages if queries.system is None else [{"role": "system", "content": queries.system}, *messages]


def cut(special: re.Pattern[str], text: str) -> str:
    """The text with a mark in each special token, across which none is read."""
    return special.sub(lambda token: f"{token[0][0]}{CUT}{token[0][1:]}", text)


def special_tokens(tokenizer: Any, around: str) -> re.Pattern[str]:
    """Return those of the tokenizer, and other tokens that are added to its own and that the chat template writes."""
    added = tokenizer.added_tokens_decoder.values()
    names = {token.content for token in added if token.content.strip() and (token.special or token.content in around)}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def _media(row: Row, messages: Messages) -> list[str]:
    """A remark where the row has pictures, sounds or films, or a text has a place for one."""
    places = [place[0] for message in messages if (place := _PLACE.search(message["content"]))]
    for name, value in row.columns.items():
        first = value[0] if isinstance(value, list | tuple) and value else value
        is_file = isinstance(first, bytes) or (isinstance(first, Mapping) and "bytes" in first)
        if is_file or (first and not isinstance(first, int | float) and _MEDIA.search(name)):
            places.append(f"the column {name!r}")
    return [f"it has {places[0]}, and the model reads texts alone: it sees and hears nothing"] if places else []
