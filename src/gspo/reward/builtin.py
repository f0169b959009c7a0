"""Built-in reward functions that need no mathematics: exact_match, format, reasoning_gym."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from gspo.errors import UserError
from gspo.reward.answer import answer_text, completion_text, gold_answers


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any
) -> list[float | None]:
    """1.0 where the answer (last <answer> tag, else the completion) is the column's text, None where that is empty."""
    golds = gold_answers(columns, answer_column, function="exact_match")
    return [
        None if gold is None else float(answer_text(completion) == str(gold).strip())
        for completion, gold in zip(completions, golds, strict=True)
    ]


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
        raise UserError(what, where="reward function format", mend="mend its option pattern") from None
    match = compiled.fullmatch if full_match else compiled.search
    return [float(match(completion_text(completion)) is not None) for completion in completions]


def reasoning_gym(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    task: Sequence[str],
    entry: Sequence[dict[str, Any]],
    task_options: Sequence[dict[str, Any] | None] | None = None,
    **columns: Any,
) -> list[float]:
    """The score the task's own verifier gives the answer (last <answer> tag, else the completion), mostly 0.0 to 1.0.

    Some tasks (binary_matrix, n_queens) evaluate the answer as Python: train on those in a sandbox only.
    """
    options = task_options or [None] * len(task)
    return [
        _verified(name, json.dumps(option or {}, sort_keys=True), item, answer_text(completion))
        for name, option, item, completion in zip(task, options, entry, completions, strict=True)
    ]


def _verified(task: str, options: str, entry: dict[str, Any], answer: str) -> float:
    verifier = _verifier(task, options)
    try:
        return float(verifier.score_answer(answer, entry))
    except Exception:  # some verifiers raise on text they cannot read; such an answer is wrong
        return 0.0


@lru_cache(maxsize=32)
def _verifier(task: str, options: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, **json.loads(options), seed=0, size=1)
