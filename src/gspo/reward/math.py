"""The math reward: math-verify in a helper process.

A completion such as 9^{9^{9^9}} keeps sympy busy for hours inside one C call, which no exception can end. A process
can be ended: it does so itself, and only that answer is lost, not the group that the call is for.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from gspo.reward.answer import completion_text, gold_answers

MAX_COMPLETION_CHARACTERS = 4_000  # from the end, where the answer is


def math(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answer_column: str = "answer",
    seconds_per_answer: float = 2.0,
    **columns: Any,
) -> list[float | None]:
    """1.0 where math-verify finds the completion's answer equal to the column's, 0.0 where not or where it takes long.

    None where the column is empty or not mathematics. Raises RuntimeError where math-verify cannot be started.
    """
    golds = gold_answers(columns, answer_column, function="math")
    return [
        None if gold is None else _verified(str(gold), completion_text(completion), seconds_per_answer)
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _verified(gold: str, completion: str, seconds: float) -> float | None:
    question = {"gold": gold, "completion": completion[-MAX_COMPLETION_CHARACTERS:], "seconds": seconds}
    with _helper_lock:
        helper = _running_helper()
        assert helper.stdin is not None and helper.stdout is not None
        helper.stdin.write(json.dumps(question) + "\n")
        helper.stdin.flush()
        reply = helper.stdout.readline()
        if reply:
            right = json.loads(reply)
            return None if right is None else float(right)
        # It ended itself: this answer took too long or too much memory.
        if (status := helper.wait()) > 0:  # not ended by a signal, be it the alarm or for want of memory
            raise RuntimeError(f"math-verify's process ended with exit status {status}")
        return 0.0


_helper: "subprocess.Popen[str] | None" = None
_helper_lock = threading.Lock()  # a function given from Python is called in many threads


def _running_helper() -> "subprocess.Popen[str]":
    global _helper  # noqa: PLW0603 - started once, for it takes long to start
    if _helper is None or _helper.poll() is not None:
        _helper = _start_helper()
    return _helper


def _start_helper() -> "subprocess.Popen[str]":
    helper = subprocess.Popen(
        [sys.executable, "-P", "-m", "gspo.reward.math_helper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if isinstance(path, str))},
        start_new_session=True,  # Ctrl-C is for the trainer, which still wants its answers
    )
    assert helper.stdout is not None
    if helper.stdout.readline() != "ready\n":
        raise RuntimeError("math-verify did not start; is `python -c 'import math_verify'` well?")
    return helper
