"""Built-in reward functions but for math, and what they share: texts, right answers, a limit of CPU time."""

import contextlib
import json
import math as arithmetic
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gspo.errors import UserError
from gspo.reward.processes import MARK

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
GRACE_SECONDS = 2  # of CPU time, after which a computation that does not heed its limit ends its process


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any
) -> list[float | None]:
    """1.0 where the answer (last <answer> tag, else the completion) is the column's text, None where that is empty.

    Of a list in the column any entry is right; a whole number that is stored as 42.0 may be written 42 too.
    """
    golds = gold_answers(columns, answer_column, function="exact_match")
    return [
        float(_answer(completion) in right) if (right := _right_texts(gold)) else None
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

    0.0 for one that takes more than the seconds of CPU time.
    """
    from gspo.reward.gym import score

    options = [json.dumps(option or {}, sort_keys=True) for option in task_options or [None] * len(task)]
    rows = zip(task, options, entry, map(_answer, completions), strict=True)
    return [within_cpu_limit(seconds_per_answer, score, *row) for row in rows]


def completion_text(completion: Any) -> str:
    """A completion's text: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _answer(completion: Any) -> str:
    """The stripped text in the last <answer>…</answer>; the whole stripped completion where there is no tag."""
    text = completion_text(completion)
    return (TAGGED.findall(text) or [text])[-1].strip()


def is_blank(gold: Any) -> bool:
    """Whether a column's cell holds no answer: nothing, white space, NaN (an empty cell of Parquet), an empty list."""
    if isinstance(gold, float):
        return arithmetic.isnan(gold)
    return gold is None or (isinstance(gold, str) and not gold.strip()) or gold in ([], ())


def gold_answers(columns: Mapping[str, Any], name: str, *, function: str) -> list[Any]:
    """The column of right answers; UserError where there is none, naming the columns there are."""
    if name not in columns:
        there = ", ".join(column for column in columns if column != "completion_ids") or "none"
        what = f"it needs a column {name!r}; the columns there are: {there}"
        raise UserError(what, where=f"reward function {function}", fix="name the column: options: {answer_column: …}")
    return list(columns[name])


def _right_texts(gold: Any) -> set[str]:
    if is_blank(gold):
        return set()
    if isinstance(gold, list | tuple):
        return {text for entry in gold for text in _right_texts(entry)}
    is_whole = isinstance(gold, float) and gold.is_integer()
    return {str(gold).strip(), str(int(gold))} if is_whole else {str(gold).strip()}


class _OutOfTime(BaseException):
    """No Exception: the verifiers catch those."""


def within_cpu_limit(seconds: float, score: Callable[..., float], *arguments: Any) -> float:
    """The score, 0.0 where it takes more than the seconds of CPU time, which a busy machine does not change."""
    try:
        with _cpu_limit(seconds):
            return score(*arguments)
    except (_OutOfTime, MemoryError, RecursionError):
        return 0.0


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime at the limit; in a worker end the process where one long computation in C does not heed that.

    Outside of the main thread, where no signal can be handled, there is no limit but the call's own.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise _OutOfTime

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    previous = signal.signal(signal.SIGPROF, interrupt)
    try:
        if MARK in os.environ:
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + GRACE_SECONDS, hard))
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)  # again, where one is lost in a callback
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
