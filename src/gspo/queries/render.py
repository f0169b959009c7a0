"""From rows to queries: the chat template or plain text, then tokens."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.recipe.sections import QueriesConfig
from gspo.types import Query


def render_all(
    rows: Sequence[Row], tokenizer: Any, *, queries: QueriesConfig, max_prompt_tokens: int | None = None
) -> tuple[Query, ...]:
    """The rows as the model reads them.

    `tokenizer` is a transformers tokenizer; `max_prompt_tokens` is the model's positions less the new tokens.
    Raises UserError naming the row: messages without a chat template, an empty prompt, no tokens, too many tokens.
    """
    texts = [_text(row, tokenizer, queries) for row in rows]
    prompt_ids: list[tuple[int, ...]] = []
    for is_chat, pairs in groupby(texts, key=itemgetter(0)):
        same_kind = [text for _, text in pairs]
        # A chat template has written its special tokens itself.
        encoded = tokenizer(same_kind, add_special_tokens=not is_chat)["input_ids"]
        prompt_ids += [_without_end(ids, text, tokenizer) for ids, text in zip(encoded, same_kind, strict=True)]
    rendered = tuple(
        Query(id=row.id, prompt=row.prompt, text=text, prompt_ids=ids, columns=row.clean_columns)
        for row, (_, text), ids in zip(rows, texts, prompt_ids, strict=True)
    )
    _check(rendered, tokenizer, max_prompt_tokens)
    return rendered


def _is_chat(row: Row, tokenizer: Any, queries: QueriesConfig) -> bool:
    """Whether the row takes the chat template; UserError where row, tokenizer and settings do not go together."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    system, template = queries.system is not None, queries.template is not None
    is_messages = not isinstance(row.prompt, str)
    has_system = not isinstance(row.prompt, str) and row.prompt[0]["role"] == "system"
    is_chat = is_messages or (has_template if queries.chat is None else queries.chat)
    reason = "the prompt is chat messages" if is_messages else "queries.chat is true"
    instruct = "use an instruct model's tokenizer (model.tokenizer), or give prompts as text"
    refusals = (
        (is_messages and queries.chat is False, f"{reason}, and queries.chat is false", "remove queries.chat"),
        (is_chat and not has_template, f"{reason}, and the tokenizer has no chat template", instruct),
        (template and is_messages, f"{reason}, and queries.template is for text", "remove queries.template"),
        (system and has_system, "the prompt has a system message already", "remove queries.system"),
        (system and not is_chat, "queries.system needs a chat template", "put the text into queries.template"),
    )
    for is_refused, what, fix in refusals:
        if is_refused:
            raise UserError(what, where=row.id, fix=fix)
    return is_chat


def _text(row: Row, tokenizer: Any, queries: QueriesConfig) -> tuple[bool, str]:
    """Whether the chat template wrote the text, and the text."""
    is_chat = _is_chat(row, tokenizer, queries)
    messages = row.prompt
    if isinstance(messages, str):
        # Not str.format: braces in the prompt or elsewhere in the template are text.
        text = messages if queries.template is None else queries.template.replace("{prompt}", messages)
        if not is_chat:
            return False, text
        messages = [{"role": "user", "content": text}]
    if queries.system is not None:
        messages = [{"role": "system", "content": queries.system}, *messages]
    prefilled = messages[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled}
    try:
        return True, str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
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
            what = f"no tokens for {query.text[:60]!r}: without tokenizer files transformers builds an empty tokenizer"
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
