"""The text that a teacher reads in place of a prompt, with columns that the policy does not see."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gspo.errors import UserError
from gspo.queries.placeholders import fill_in
from gspo.queries.row import Row
from gspo.queries.template import with_text
from gspo.types import Query


def with_teacher_ids(
    queries: Sequence[Query], rows: Sequence[Row], prompt: str, render: Callable[[Sequence[Row]], Sequence[Query]]
) -> tuple[Query, ...]:
    """The queries with what the teacher reads: their rows, in this text, rendered as the policy's own are.

    Raises UserError where a row lacks a column that the text names.
    """
    asked = render([taught(row, prompt) for row in rows])
    return tuple(
        replace(query, teacher_ids=teachers.prompt_ids) for query, teachers in zip(queries, asked, strict=True)
    )


def taught(row: Row, prompt: str) -> Row:
    """The row with the text in place of its prompt's; of chat messages, in place of the user's last."""
    if isinstance(row.prompt, str):
        return replace(row, prompt=_filled(row, prompt, row.prompt))
    messages: list[dict[str, Any]] = [with_text(message, where=row.id) for message in row.prompt]
    for message in reversed(messages):
        if message["role"] == "user":
            message["content"] = _filled(row, prompt, message["content"])
            return replace(row, prompt=messages)
    raise UserError("no message is the user's, so teacher.prompt has no place", where=row.id, fix="leave it out")


def texts_of(row: Row) -> str:
    """The text of a row's prompt, or those of its messages."""
    return row.prompt if isinstance(row.prompt, str) else " ".join(str(m.get("content")) for m in row.prompt)


def _filled(row: Row, prompt: str, text: str) -> str:
    return fill_in(prompt, {**row.clean_columns, "prompt": text}, key="teacher.prompt", where=row.id)
