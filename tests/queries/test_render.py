"""What the model reads: chat template or plain text, each with its special tokens once."""

from typing import Any

import pytest

from gspo.errors import UserError
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.recipe.sections import QueriesConfig

MESSAGES = [{"role": "user", "content": "hi"}]


def render(prompt: Any, tokenizer: Any, *, max_prompt_tokens: int | None = None, **queries: Any) -> Any:
    row = Row(id="data:1", prompt=prompt, columns={"answer": "2"})
    (query,) = render_all([row], tokenizer, queries=QueriesConfig(**queries), max_prompt_tokens=max_prompt_tokens)
    return query


def test_plain_text_gets_the_start_token_and_keeps_its_columns(tokenizer: Any) -> None:
    query = render("1+1=", tokenizer)
    assert query.prompt_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(query.prompt_ids[1:]) == query.text == "1+1="
    assert (query.id, query.prompt, query.columns) == ("data:1", "1+1=", {"answer": "2"})


def test_an_appended_end_token_is_taken_off(ending_tokenizer: Any) -> None:
    assert ending_tokenizer("hi")["input_ids"][-1] == ending_tokenizer.eos_token_id
    assert render("hi", ending_tokenizer).prompt_ids == tuple(ending_tokenizer("hi")["input_ids"][:-1])


def test_messages_take_the_chat_template_without_a_second_start_token(chat_tokenizer: Any) -> None:
    query = render(MESSAGES, chat_tokenizer)
    assert query.text == "<|user|>hi<|end|><|assistant|>"
    assert chat_tokenizer.decode(query.prompt_ids) == query.text
    assert query.prompt == MESSAGES


def test_text_takes_the_chat_template_where_there_is_one(chat_tokenizer: Any) -> None:
    assert render("hi", chat_tokenizer).text == "<|user|>hi<|end|><|assistant|>"
    assert render("hi", chat_tokenizer, chat=False).text == "hi"
    assert render("hi", chat_tokenizer).prompt == "hi"


def test_system_message_and_template(chat_tokenizer: Any) -> None:
    query = render("hi {x}", chat_tokenizer, system="Be brief.", template="Q: {prompt} {y}")
    assert query.text == "<|system|>Be brief.<|end|><|user|>Q: hi {x} {y}<|end|><|assistant|>"
    assert render(MESSAGES, chat_tokenizer, system="Be brief.").text.startswith("<|system|>Be brief.<|end|><|user|>hi")


def test_a_begun_answer_is_continued(chat_tokenizer: Any) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    assert render(begun, chat_tokenizer).text == "<|user|>hi<|end|><|assistant|>Well,"


def test_many_rows_keep_their_order(chat_tokenizer: Any) -> None:
    rows = [Row(id=f"d:{i}", prompt=MESSAGES if i % 2 else f"text {i}") for i in range(6)]
    queries = render_all(rows, chat_tokenizer, queries=QueriesConfig())
    assert [query.id for query in queries] == [row.id for row in rows]
    assert all(chat_tokenizer.decode(query.prompt_ids) == query.text for query in queries)


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        (MESSAGES, {}, "no chat template"),
        (MESSAGES, {"chat": False}, "messages, and queries.chat is false"),
        ("hi", {"chat": True}, "no chat template"),
        ("hi", {"system": "x"}, "needs a chat template"),
        (" ", {}, "prompt is empty"),
    ],
)
def test_what_cannot_be_rendered_plainly(prompt: Any, settings: dict[str, Any], said: str, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=said):
        render(prompt, tokenizer, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"system": "x"}, "system message already"), ({"template": "Q {prompt}"}, "queries.template is for text")],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict[str, Any], said: str, chat_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=said):
        render([{"role": "system", "content": "s"}, *MESSAGES], chat_tokenizer, **settings)


def test_a_template_that_refuses_its_messages_is_one_message(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"data:1.*roles must alternate"):
        render(MESSAGES, chat_tokenizer)


def test_a_tokenizer_without_a_vocabulary_is_found_out() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<|end|>")
    with pytest.raises(UserError, match="without tokenizer files"):
        render("hello", empty)


def test_a_prompt_too_long_names_the_row_its_tokens_and_the_limit(tokenizer: Any) -> None:
    assert len(render("12345", tokenizer, max_prompt_tokens=6).prompt_ids) == 6
    with pytest.raises(UserError, match=r"data:1: the prompt has 7 tokens.*leave 6(.|\n)*rollout\.max_new_tokens"):
        render("123456", tokenizer, max_prompt_tokens=6)
