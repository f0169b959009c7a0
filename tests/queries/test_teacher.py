"""What a teacher reads in place of the prompt: filled in from the row's columns, rendered as prompts are."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from tests.small_model import save_small_model

from gspo.errors import UserError
from gspo.model.load import load_tokenizer
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.queries.source import with_teacher_ids
from gspo.recipe.sections import QueriesConfig

HINT = "{prompt} Hint: {answer}."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    save_small_model(path := tmp_path_factory.mktemp("small"))
    return load_tokenizer(str(path))


def read_by_teacher(tokenizer: Any, rows: Sequence[Row], prompt: str, **queries: Any) -> tuple[list[str], Any]:
    """What a teacher reads, as text, and the queries."""
    render = partial(render_all, tokenizer=tokenizer, queries=QueriesConfig(**queries))
    taught = with_teacher_ids(render(rows), rows, prompt, render)
    return [tokenizer.decode(query.teacher_ids) for query in taught], taught


def test_a_text_is_filled_in_and_the_policys_own_prompt_stays(tokenizer: Any) -> None:
    row = Row(id="data:1", prompt="What is 1 + {2}?", columns={"answer": 3})
    texts, (query,) = read_by_teacher(tokenizer, [row], HINT, chat=False, template="Solve: {prompt}")
    assert texts == ["Solve: What is 1 + {2}? Hint: 3."]  # braces of the row's own text are text
    assert query.prompt == row.prompt and query.text == "Solve: What is 1 + {2}?"
    assert query.prompt_ids != query.teacher_ids


def test_of_messages_the_users_last_is_another(tokenizer: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "What is 2?"}]},
    ]
    row = Row(id="data:1", prompt=messages, columns={"answer": "3"})
    (text,), _ = read_by_teacher(tokenizer, [row], HINT, system="Be brief.")
    assert text.split("\n") == [
        *("system: Be brief.", "user: What is 1?", "assistant: 1", "user: What is 2? Hint: 3.", "assistant: ")
    ]


@pytest.mark.parametrize("columns", [{}, {"answer": None}, {"solution": "3"}])
def test_a_column_that_a_row_lacks_is_named(tokenizer: Any, columns: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"data:7(.|\n)*names \{answer\}, and the row has no such column"):
        read_by_teacher(tokenizer, [Row(id="data:7", prompt="What is 1?", columns=columns)], HINT)
