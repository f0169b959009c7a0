"""From rows to queries: the chat template or plain text, then tokens."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.recipe.sections import QueriesConfig
from gspo.types import Query

_ARGUMENTS = "chat_template_kwargs"  # of the recipe's queries, and a row's column, as TRL has it


def render_all(rows: Sequence[Row], tokenizer: Any, *, queries: QueriesConfig) -> tuple[Query, ...]:
    """The rows as the model reads them; `tokenizer` is a transformers tokenizer.

    Raises UserError naming the row: messages without a chat template, an empty prompt, no tokens.
    """
    if not rows:
        return ()
    has_template = bool(getattr(tokenizer, "chat_template", None))
    # Of every row: chat messages are refused where the template is not applied.
    is_chat = has_template if queries.chat is None else queries.chat
    for row in rows:
        _check_row(row, queries, is_chat=is_chat, has_template=has_template)
    texts = [_text(row, tokenizer, queries, is_chat=is_chat) for row in rows]
    # A chat template has written its special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not is_chat)["input_ids"]
    rendered = []
    for row, text, ids in zip(rows, texts, encoded, strict=True):
        # Some tokenizers end every text with their end token, after which a model has nothing to say.
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]
        query = Query(id=row.id, prompt=row.prompt, text=text, prompt_ids=tuple(ids), columns=row.clean_columns)
        rendered.append(query)
    _check_tokens(rendered, tokenizer)
    return tuple(rendered)


def template_notes(rows: Sequence[Row], tokenizer: Any, queries: QueriesConfig) -> list[str]:
    """On variables that the chat template does not mention, and would ignore, and on answers that have been begun."""
    names = dict.fromkeys(name for row in rows for name in _arguments(row, queries))
    template = str(getattr(tokenizer, "chat_template", None))
    unknown = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]
    notes = [f"{_ARGUMENTS}: the tokenizer's chat template has no variable {name}" for name in unknown]
    prefilled = [row for row in rows if not isinstance(row.prompt, str) and row.prompt[-1].get("role") == "assistant"]
    if prefilled:
        notes.append(
            f"the last message of {len(prefilled):,} of {len(rows):,} rows is the assistant's: the model goes on with "
            "it. Where that is the right answer, remove it, or give it as a column of its own"
        )
    return notes


def _arguments(row: Row, queries: QueriesConfig) -> dict[str, Any]:
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
    """UserError where row, tokenizer and settings do not go together."""
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


def _text(row: Row, tokenizer: Any, queries: QueriesConfig, *, is_chat: bool) -> str:
    messages = row.prompt
    if isinstance(messages, str):
        # Not str.format: braces in the prompt or elsewhere in the template are text.
        text = messages if queries.template is None else queries.template.replace("{prompt}", messages)
        if not is_chat:
            return text
        messages = [{"role": "user", "content": text}]
    if queries.system is not None:
        messages = [{"role": "system", "content": queries.system}, *messages]
    prefilled = messages[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template(messages, **(_arguments(row, queries) | options)))
    except Exception as error:  # a template's own complaints come as jinja2 errors of many kinds
        raise UserError(f"the chat template refuses the messages: {error}", where=row.id) from None


def _check_tokens(queries: Sequence[Query], tokenizer: Any) -> None:
    special = set(tokenizer.all_special_ids)
    for query in queries:
        if not query.text.strip():
            fix = "remove the row, or name the right column in queries.prompt"
            raise UserError("the prompt is empty", where=query.id, fix=fix)
        if special.issuperset(query.prompt_ids) and not tokenizer(query.text, add_special_tokens=False)["input_ids"]:
            what = f"no tokens for {query.text[:60]!r}: without tokenizer files transformers builds an empty tokenizer"
            fix = "copy the tokenizer's files into the model directory, or set model.tokenizer"
            raise UserError(what, where=query.id, fix=fix)
