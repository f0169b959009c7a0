"""The answer within a completion: the last <answer>…</answer>, else all of it."""

import math
import re
from collections.abc import Mapping
from typing import Any

from gspo.errors import UserError

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def completion_text(completion: Any) -> str:
    """A completion's text: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def tagged_answer(text: str) -> str | None:
    """The stripped text in the last <answer>…</answer>, or None where there is no such tag."""
    found = TAGGED.findall(text)
    return found[-1].strip() if found else None


def answer_text(completion: Any) -> str:
    """The stripped text in the last <answer>…</answer>; the whole stripped completion where there is no tag."""
    text = completion_text(completion)
    tagged = tagged_answer(text)
    return text.strip() if tagged is None else tagged


def is_blank(gold: Any) -> bool:
    """Whether a column's cell holds no answer: nothing, white space, NaN (an empty cell of Parquet), an empty list."""
    if isinstance(gold, float):
        return math.isnan(gold)
    return gold is None or (isinstance(gold, str) and not gold.strip()) or gold in ([], ())


def gold_answers(columns: Mapping[str, Any], name: str, *, function: str) -> list[Any]:
    """The column of right answers; UserError where there is none, naming the columns there are."""
    if name not in columns:
        there = ", ".join(column for column in columns if column != "completion_ids") or "none"
        what = f"it needs a column {name!r}; the columns there are: {there}"
        fix = "name the column: options: {answer_column: …}"
        raise UserError(what, where=f"reward function {function}", fix=fix)
    return list(columns[name])
