"""From rows to queries: the chat template or plain text, then tokens."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.recipe.schema import QueriesConfig
from gspo.types import Query


def render_all(
    rows: Sequence[Row], tokenizer: Any, *, queries: QueriesConfig, max_prompt_tokens: int | None = None
) -> tuple[Query, ...]:
    """The rows as the model reads them.

    `tokenizer` is a transformers tokenizer; `max_prompt_tokens` is the model's positions less the new tokens.
    Raises UserError naming the row: messages without a chat template, an empty prompt, no tokens, too many tokens.
    """
    is_chat = [_is_chat(row, tokenizer, queries) for row in rows]
    texts = [_text(row, tokenizer, queries, is_chat=chat) for row, chat in zip(rows, is_chat, strict=True)]
    prompt_ids: list[tuple[int, ...]] = []
    for chat, pairs in groupby(zip(is_chat, texts, strict=True), key=lambda pair: pair[0]):
        same_kind = [text for _, text in pairs]
        # A chat template has written its special tokens itself.
        encoded = tokenizer(same_kind, add_special_tokens=not chat)["input_ids"]
        prompt_ids += [_without_end(ids, text, tokenizer) for ids, text in zip(encoded, same_kind, strict=True)]
    queries_made = tuple(
        Query(id=row.id, prompt=row.prompt, text=text, prompt_ids=ids, columns=row.clean_columns)
        for row, text, ids in zip(rows, texts, prompt_ids, strict=True)
    )
    _check(queries_made, tokenizer, max_prompt_tokens)
    return queries_made


def _is_chat(row: Row, tokenizer: Any, queries: QueriesConfig) -> bool:
    """Whether the row takes the chat template; UserError where row, tokenizer and settings do not go together."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    is_messages = not isinstance(row.prompt, str)
    has_system = not isinstance(row.prompt, str) and row.prompt[0]["role"] == "system"
    is_chat = is_messages or (has_template if queries.chat is None else queries.chat)
    asked_by = "the prompt is chat messages" if is_messages else "queries.chat is true"
    wants_system, wants_template = queries.system is not None, queries.template is not None
    refusals = (
        (is_messages and queries.chat is False, f"{asked_by}, and queries.chat is false", "remove queries.chat"),
        (
            is_chat and not has_template,
            f"{asked_by}, and the tokenizer has no chat template",
            "give prompts as text, or set model.tokenizer to an instruct model's",
        ),
        (wants_system and not is_chat, "queries.system needs a chat template", "put the text into queries.template"),
        (wants_system and has_system, "the prompt has a system message already", "remove queries.system"),
        (
            wants_template and is_messages,
            "queries.template is for text, and the prompt is messages",
            "remove queries.template",
        ),
    )
    for is_refused, what, fix in refusals:
        if is_refused:
            raise UserError(what, where=row.id, fix=fix)
    return is_chat


def _text(row: Row, tokenizer: Any, queries: QueriesConfig, *, is_chat: bool) -> str:
    if isinstance(row.prompt, str):
        # Not str.format: braces in the prompt or elsewhere in the template are text.
        text = row.prompt if queries.template is None else queries.template.replace("{prompt}", row.prompt)
        messages = [{"role": "user", "content": text}]
    else:
        messages = row.prompt
    if not is_chat:
        return text
    if queries.system is not None:
        messages = [{"role": "system", "content": queries.system}, *messages]
    prefilled = messages[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template's own complaints come as jinja2 errors of many kinds
        raise UserError(f"the chat template refuses the messages: {error}", where=row.id) from None


def _without_end(ids: Sequence[int], text: str, tokenizer: Any) -> tuple[int, ...]:
    """Some tokenizers end every text with their end token, after which a model has nothing to say."""
    end = tokenizer.eos_token_id
    appended = end is not None and len(ids) > 1 and ids[-1] == end and not text.endswith(tokenizer.eos_token)
    return tuple(ids[:-1] if appended else ids)


def _check(queries: Sequence[Query], tokenizer: Any, max_prompt_tokens: int | None) -> None:
    special = set(tokenizer.all_special_ids)
    for query in queries:
        if not query.text.strip():
            fix = "remove the row, or name the right column in queries.prompt"
            raise UserError("the prompt is empty", where=query.id, fix=fix)
        if special.issuperset(query.prompt_ids) and not tokenizer(query.text, add_special_tokens=False)["input_ids"]:
            what = (
                f"the tokenizer turns {query.text[:60]!r} into no tokens: for a model directory without tokenizer "
                "files transformers builds an empty tokenizer"
            )
            fix = "copy the tokenizer's files into the model directory, or set model.tokenizer"
            raise UserError(what, where=query.id, fix=fix)
    if max_prompt_tokens is None:
        return
    too_long = [query for query in queries if len(query.prompt_ids) > max_prompt_tokens]
    if too_long:
        num_tokens, others = len(too_long[0].prompt_ids), f" ({len(too_long)} such rows)" if len(too_long) > 1 else ""
        what = f"the prompt has {num_tokens} tokens; the model's positions less rollout.max_new_tokens leave "
        fix = "lower rollout.max_new_tokens, remove long rows, or use a model with more positions"
        raise UserError(f"{what}{max_prompt_tokens}{others}", where=too_long[0].id, fix=fix)
