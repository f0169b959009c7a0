"""What the model reads: chat template or plain text, each with its special tokens once."""

from typing import Any

import pytest

from gspo.errors import UserError
from gspo.queries.render import remark_notes, render_all, variable_notes
from gspo.queries.row import Row
from gspo.recipe.sections import QueriesConfig

MESSAGES = [{"role": "user", "content": "hi"}]


def render(prompt: Any, tokenizer: Any, *, columns: Any = None, **queries: Any) -> Any:
    row = Row(id="data:1", prompt=prompt, columns={"answer": "2", **(columns or {})})
    (query,) = render_all([row], tokenizer, queries=QueriesConfig(**queries))
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
    with pytest.raises(UserError, match="none of it is a token"):
        render("hello", empty)


@pytest.mark.parametrize("added", ["<s> $A", "<s> $A </s>"])
def test_a_text_of_characters_that_the_tokenizer_lacks_is_found_out(added: str) -> None:
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    tokens = {"<s>": 0, "</s>": 1, "h": 2, "i": 3}
    built = Tokenizer(models.BPE(tokens, []))
    built.post_processor = processors.TemplateProcessing(single=added, special_tokens=[("<s>", 0), ("</s>", 1)])
    latin = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>")
    assert render("hi", latin).prompt_ids == (0, 2, 3)
    with pytest.raises(UserError, match=r"data:1(.|\n)*none of it is a token"):
        render("七加二等于多少？", latin)


@pytest.fixture
def thinking_tokenizer(chat_tokenizer: Any) -> Any:
    """Its template has a variable of its own."""
    chat_tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
    return chat_tokenizer


def test_the_recipe_gives_the_template_variables_and_a_row_gives_others(thinking_tokenizer: Any) -> None:
    def ends_without_thinking(recipe: Any, row: Any = None) -> bool:
        columns = {"chat_template_kwargs": row}
        return render("hi", thinking_tokenizer, columns=columns, chat_template_kwargs=recipe).text.endswith("<no>")

    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    assert ends_without_thinking(off) and not ends_without_thinking({})
    assert ends_without_thinking({}, off) and ends_without_thinking(on, off) and not ends_without_thinking(off, on)
    assert not ends_without_thinking(on, {"enable_thinking": None})  # Parquet: a row that has none
    set_by_gspo = {"tokenize": True, "add_generation_prompt": False}
    assert ends_without_thinking({**off, **set_by_gspo}) and not ends_without_thinking(set_by_gspo)


@pytest.mark.parametrize(
    ("recipe", "row", "words"),
    [
        ({}, "{}", r"data:1: column 'chat_template_kwargs' holds '{}', not a mapping"),
        ({}, {1: 2}, "not a mapping"),
        ({"conversation": "x"}, None, "the chat template refuses the messages: .* multiple values"),
    ],
)
def test_what_is_no_variable_of_a_template_is_refused(recipe: Any, row: Any, words: str, chat_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=words):
        render("hi", chat_tokenizer, columns={"chat_template_kwargs": row}, chat_template_kwargs=recipe)


def test_variables_need_a_template_and_one_that_it_lacks_is_noted(tokenizer: Any, thinking_tokenizer: Any) -> None:
    row = Row(id="data:1", prompt="hi", columns={"chat_template_kwargs": {"enable_thinking": False}})
    given = QueriesConfig(chat_template_kwargs={"enable_thinkin": False})
    rendered = render_all([row], thinking_tokenizer, queries=QueriesConfig())
    assert variable_notes(rendered, thinking_tokenizer, QueriesConfig()) == []
    (note,) = variable_notes(rendered, thinking_tokenizer, given)
    assert note.endswith("no variable enable_thinkin")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"queries\.chat_template_kwargs needs a chat template"):
        render_all([row], tokenizer, queries=given)


def test_rows_that_end_in_the_assistants_words_are_counted(thinking_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [Row(id="data:1", prompt=messages, columns={}), Row(id="data:2", prompt=messages[:1], columns={})]
    notes = remark_notes(render_all(rows, thinking_tokenizer, queries=QueriesConfig()), "prompts")
    assert any(note.startswith("1 of 2 prompts: the last message is the assistant's") for note in notes)
