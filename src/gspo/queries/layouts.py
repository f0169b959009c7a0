"""Which column is the prompt: the layouts that need no mapping (TRL, GSM8K, question and answer, AIME, verl)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.recipe.writable import writable

# By precedence; matched without regard to case, since published sets write `Problem` and `Answer` too.
PROMPT_COLUMNS = ("prompt", "question", "problem")
GSM8K_ANSWER = re.compile(r"####\s*(?P<number>[^\n]*\S)\s*$")


def lay_out(raw_rows: Sequence[Mapping[str, Any]], *, source: str, prompt_column: str | None = None) -> list[Row]:
    """Rows with their prompt found and the other columns ready for the reward; every row gets every column.

    GSM8K: `answer` becomes the number behind ####, `solution` the worked text. verl: `answer` is the ground truth.
    Raises UserError where the prompt column is missing (naming the columns there are), a prompt is not one, or columns
    that differ in case leave open which is meant.
    """
    names = list(dict.fromkeys(name for row in raw_rows for name in row))
    prompt_name = _prompt_column(names, source=source, wanted=prompt_column)
    answer_name = _spelling(names, "answer", source=source)
    is_gsm8k = prompt_name.lower() == "question" and _gsm8k_number(raw_rows[0].get(answer_name or "")) is not None
    rows = []
    for number, raw in enumerate(raw_rows, start=1):
        row_id = f"{source}:{number}"
        columns: dict[str, Any] = {name: raw.get(name) for name in names if name != prompt_name}
        if answer_name is not None and answer_name != prompt_name:
            columns["answer"] = columns.pop(answer_name)
        if is_gsm8k:
            _split_gsm8k_answer(columns, where=row_id)
        if isinstance(verl := columns.get("reward_model"), Mapping) and "ground_truth" in verl:
            columns.setdefault("answer", verl["ground_truth"])
        rows.append(Row(id=row_id, prompt=_checked_prompt(raw.get(prompt_name), prompt_name, row_id), columns=columns))
    return rows


def _prompt_column(names: Sequence[str], *, source: str, wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in names:
            what = f"no column {wanted!r}; the columns there are: {', '.join(names)}"
            raise UserError(what, where=source, fix="set queries.prompt to one of them")
        return wanted
    for known in PROMPT_COLUMNS:
        if (name := _spelling(names, known, source=source)) is not None:
            return name
    what = f"no column {', '.join(PROMPT_COLUMNS)}; the columns there are: {', '.join(names)}"
    raise UserError(what, where=source, fix="set queries.prompt to the column with the text or chat messages")


def _spelling(names: Sequence[str], known: str, *, source: str) -> str | None:
    """The column of this name, else the one that differs in case only; UserError where several do."""
    spelled = [name for name in names if name.lower() == known]
    if known in spelled:
        return known
    if len(spelled) > 1:
        what = f"columns {' and '.join(spelled)}: which of them is {known!r} cannot be told"
        raise UserError(what, where=source, fix="rename them")
    return spelled[0] if spelled else None


def _gsm8k_number(answer: Any) -> str | None:
    found = GSM8K_ANSWER.search(answer) if isinstance(answer, str) else None
    return found["number"].replace(",", "") if found else None


def _split_gsm8k_answer(columns: dict[str, Any], *, where: str) -> None:
    worked = columns["answer"]
    number = _gsm8k_number(worked)
    if number is None:
        what = f"the first row's answer ends in '#### number' and this one does not: {str(worked)[-60:]!r}"
        raise UserError(what, where=where, fix="make the answers alike")
    columns.setdefault("solution", worked)
    columns["answer"] = number


def _is_readable(prompt: Any) -> bool:
    try:
        return writable(prompt) == prompt
    except RecursionError:
        return False


def _checked_prompt(prompt: Any, name: str, row_id: str) -> Any:
    if not _is_readable(prompt):
        what = f"column {name!r} holds half of a surrogate pair, a number that is not finite, or levels without end"
        raise UserError(what, where=row_id, fix="fix the row: no tokenizer reads such a prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Iterable) and not isinstance(prompt, Mapping):
        messages = list(prompt)
        if messages and all(isinstance(message, Mapping) and "role" in message for message in messages):
            return [dict(message) for message in messages]
    what = f"column {name!r} holds {str(prompt)[:60]!r}: neither text nor a list of messages with a role and content"
    raise UserError(what, where=row_id, fix="fix the row, or set queries.prompt to another column")
