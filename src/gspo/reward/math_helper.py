"""The process in which math-verify runs: one JSON question a line in, one JSON answer a line out."""

import contextlib
import json
import logging
import resource
import signal
import sys
from typing import Any

from gspo.reward.answer import tagged_answer

MAX_MEMORY_BYTES = 4 * 2**30
MATHEMATICS_MARKS = ("$", "\\boxed", "\\[", "\\(")


def serve() -> None:
    """Answer questions until standard input ends; a question that takes longer than its seconds ends the process."""
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing that sympy prints may pass for an answer
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses this limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    import math_verify  # noqa: F401 - before "ready", so that its time is nobody's

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        # The alarm's default action ends the process from outside Python: a C call that never returns cannot stop it.
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        right = is_right(question["gold"], question["completion"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(right), file=replies, flush=True)


def is_right(gold: str, completion: str) -> bool | None:
    """Whether the completion's answer equals the gold one; None where the gold answer is not mathematics."""
    right_answer = _parse(_as_formula(gold)) or _parse(gold)
    if not right_answer:
        return None
    tagged = tagged_answer(completion)
    # Within a tag a bare formula needs no dollar signs; elsewhere only math-verify's own anchors count.
    readings = [completion] if tagged is None else [tagged, _as_formula(tagged)]
    return any(_equal(right_answer, _parse(reading)) for reading in readings)


def _as_formula(text: str) -> str:
    return text if any(mark in text for mark in MATHEMATICS_MARKS) else f"${text}$"


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    try:
        return list(parse(text, parsing_timeout=None))
    except (RecursionError, MemoryError):
        return []


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, answer, timeout_seconds=None))
    except (RecursionError, MemoryError):
        return False


if __name__ == "__main__":
    serve()
