"""Built-in reward functions that need no mathematics: exact_match, format, reasoning_gym."""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from gspo.errors import UserError
from gspo.reward.answer import answer_text, completion_text, gold_answers, is_blank
from gspo.reward.verifier_process import VERIFIERS


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any
) -> list[float | None]:
    """1.0 where the answer (last <answer> tag, else the completion) is the column's text, None where that is empty.

    Of a list in the column any entry is right; a whole number that is stored as 42.0 may be written 42 too.
    """
    golds = gold_answers(columns, answer_column, function="exact_match")
    return [
        float(answer_text(completion) in right) if (right := _texts(gold)) else None
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _texts(gold: Any) -> set[str]:
    """All texts that are right; none where the cell is empty."""
    if is_blank(gold):
        return set()
    if isinstance(gold, list | tuple):
        return {text for entry in gold for text in _texts(entry)}
    is_whole = isinstance(gold, float) and gold.is_integer()
    return {str(gold).strip(), str(int(gold))} if is_whole else {str(gold).strip()}


def format_match(
    prompts: Sequence[Any], completions: Sequence[Any], *, pattern: str, full_match: bool = False, **columns: Any
) -> list[float]:
    """1.0 where the regular expression is found in the completion (or is all of it); `.` matches line ends too.

    Raises UserError for a pattern that is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        what = f"not a regular expression: {error}: {pattern!r}"
        raise UserError(what, where="reward function format", fix="fix its option pattern") from None
    match = compiled.fullmatch if full_match else compiled.search
    return [float(match(completion_text(completion)) is not None) for completion in completions]


def reasoning_gym(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    task: Sequence[str],
    entry: Sequence[dict[str, Any]],
    task_options: Sequence[dict[str, Any] | None] | None = None,
    seconds_per_answer: float = 10.0,
    **columns: Any,
) -> list[float]:
    """The score the task's own verifier gives the answer (last <answer> tag, else the completion), mostly 0.0 to 1.0.

    0.0 for one that takes more than the seconds of CPU time. Raises VerifierError where the process that judges fails.
    """
    texts = [answer_text(completion) for completion in completions]
    options = [json.dumps(option or {}, sort_keys=True) for option in task_options or [None] * len(task)]
    rows = zip(task, options, entry, texts, strict=True)
    scores: list[float] = []
    for _, same in groupby(rows, key=lambda row: (row[0], row[1], id(row[2]))):
        answers = list(same)
        name, option, item, _ = answers[0]
        subject = {"task": name, "options": option, "entry": item}
        answers_texts = [text for *_, text in answers]
        scores += VERIFIERS["reasoning_gym"].scores(subject, answers_texts, seconds=seconds_per_answer)
    return scores
