"""From rows to queries: the chat template or plain text, then tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.recipe.schema import QueriesConfig
from gspo.types import Messages, Query


def render_all(
    rows: Sequence[Row], tokenizer: Any, *, queries: QueriesConfig, max_prompt_tokens: int | None = None
) -> tuple[Query, ...]:
    """The rows as the model reads them.

    `tokenizer` is a transformers tokenizer; `max_prompt_tokens` is the model's positions less the new tokens.
    Raises UserError naming the row: messages without a chat template, an empty prompt, no tokens, too many tokens.
    """
    chat = [_takes_chat_template(row, tokenizer, queries) for row in rows]
    texts = [
        _chat_text(row, tokenizer, queries) if is_chat else _plain_text(row, queries)
        for row, is_chat in zip(rows, chat, strict=True)
    ]
    for row, text in zip(rows, texts, strict=True):
        if not text.strip():
            raise UserError("the prompt is empty", where=row.id, fix="remove the row, or name the right queries.prompt")
    token_ids = _tokenise(texts, chat, tokenizer)
    _check_tokens(rows, texts, token_ids, tokenizer)
    if max_prompt_tokens is not None:
        _check_lengths(rows, token_ids, max_prompt_tokens)
    return tuple(
        Query(id=row.id, prompt=row.prompt, text=text, prompt_ids=ids, columns=row.clean_columns)
        for row, text, ids in zip(rows, texts, token_ids, strict=True)
    )


def _takes_chat_template(row: Row, tokenizer: Any, queries: QueriesConfig) -> bool:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    is_messages = not isinstance(row.prompt, str)
    if is_messages and queries.chat is False:
        fix = "remove queries.chat, or give prompts as text"
        raise UserError(
            "the prompt is chat messages, which only a chat template turns into text", where=row.id, fix=fix
        )
    wanted = is_messages or (has_template if queries.chat is None else queries.chat)
    if wanted and not has_template:
        what = "the prompt is chat messages" if is_messages else "queries.chat is true"
        fix = "use an instruct model's tokenizer (model.tokenizer), or give prompts as text"
        raise UserError(f"{what}, and the tokenizer has no chat template", where=row.id, fix=fix)
    if queries.system is not None and not wanted:
        fix = "put the text into queries.template instead"
        raise UserError("a system message needs a chat template", where="queries.system", fix=fix)
    return wanted


def _plain_text(row: Row, queries: QueriesConfig) -> str:
    assert isinstance(row.prompt, str)
    # Not str.format: braces in the prompt or elsewhere in the template are text.
    return row.prompt if queries.template is None else queries.template.replace("{prompt}", row.prompt)


def _chat_text(row: Row, tokenizer: Any, queries: QueriesConfig) -> str:
    messages = _messages(row, queries)
    prefilled = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not prefilled, continue_final_message=prefilled
        )
    except Exception as error:  # a template's own complaints come as jinja2 errors of many kinds
        raise UserError(f"the chat template refuses the messages: {error}", where=row.id) from None
    return str(text)


def _messages(row: Row, queries: QueriesConfig) -> Messages:
    if isinstance(row.prompt, str):
        messages = [{"role": "user", "content": _plain_text(row, queries)}]
    elif queries.template is not None:
        fix = "remove queries.template, or give prompts as text"
        raise UserError("a template goes around a text prompt, and this one is messages", where=row.id, fix=fix)
    else:
        messages = list(row.prompt)
    if queries.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise UserError("the prompt has a system message already", where=row.id, fix="remove queries.system")
    return [{"role": "system", "content": queries.system}, *messages]


def _tokenise(texts: Sequence[str], chat: Sequence[bool], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of every text; a chat template has written its special tokens itself."""
    token_ids: list[tuple[int, ...]] = [()] * len(texts)
    for is_chat in (False, True):
        chosen = [index for index, kind in enumerate(chat) if kind is is_chat]
        if chosen:
            encoded = tokenizer([texts[index] for index in chosen], add_special_tokens=not is_chat)["input_ids"]
            for index, ids in zip(chosen, encoded, strict=True):
                token_ids[index] = _without_end(ids, texts[index], tokenizer)
    return token_ids


def _without_end(ids: Sequence[int], text: str, tokenizer: Any) -> tuple[int, ...]:
    """Some tokenizers end every text with their end token, after which a model has nothing to say."""
    end = tokenizer.eos_token_id
    appended = end is not None and len(ids) > 1 and ids[-1] == end and not text.endswith(tokenizer.eos_token)
    return tuple(ids[:-1] if appended else ids)


def _check_tokens(
    rows: Sequence[Row], texts: Sequence[str], token_ids: Iterable[tuple[int, ...]], tokenizer: Any
) -> None:
    special = set(tokenizer.all_special_ids)
    for row, text, ids in zip(rows, texts, token_ids, strict=True):
        if special.issuperset(ids) and not tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise UserError(
                f"the tokenizer turns {text[:60]!r} into no tokens: for a model directory without tokenizer files "
                "transformers builds an empty tokenizer",
                where=row.id,
                fix="copy the tokenizer's files into the model directory, or set model.tokenizer",
            )


def _check_lengths(rows: Sequence[Row], token_ids: Sequence[tuple[int, ...]], max_prompt_tokens: int) -> None:
    too_long = [(row.id, len(ids)) for row, ids in zip(rows, token_ids, strict=True) if len(ids) > max_prompt_tokens]
    if too_long:
        name, num_tokens = too_long[0]
        others = f" ({len(too_long)} such rows)" if len(too_long) > 1 else ""
        raise UserError(
            f"the prompt has {num_tokens} tokens; the model's positions less rollout.max_new_tokens leave "
            f"{max_prompt_tokens}{others}",
            where=name,
            fix="lower rollout.max_new_tokens, remove long rows, or use a model with more positions",
        )
