"""The math reward: math-verify in processes of its own.

A completion such as 9^{9^{9^9}} keeps sympy busy for hours inside one C call, which neither a thread's time limit
nor an exception can end. A process can be ended: it does so itself, and only that answer is lost.
"""

import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
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
    worker = _idle_workers.get()
    try:
        if worker is None or worker.poll() is not None:
            worker = _start_worker()
        reply = _ask(worker, {"gold": gold, "completion": completion[-MAX_COMPLETION_CHARACTERS:], "seconds": seconds})
        if not reply:  # it ended itself: this answer took too long or too much memory
            status, worker = worker.wait(), None
            if status > 0:  # not ended by a signal, be it the alarm or for want of memory
                raise RuntimeError(f"math-verify's process ended with exit status {status}")
            return 0.0
        right = json.loads(reply)
        return None if right is None else float(right)
    finally:
        _idle_workers.put(worker)


def _ask(worker: "subprocess.Popen[str]", question: dict[str, Any]) -> str:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps(question) + "\n")
    worker.stdin.flush()
    return worker.stdout.readline()


def _start_worker() -> "subprocess.Popen[str]":
    package_home = str(Path(__file__).parents[2])
    search_path = os.pathsep.join([package_home, *filter(None, [os.environ.get("PYTHONPATH")])])
    worker = subprocess.Popen(
        [sys.executable, "-m", "gspo.reward.math_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": search_path},
        start_new_session=True,  # Ctrl-C is for the trainer, which still wants its answers
    )
    assert worker.stdout is not None
    if worker.stdout.readline() != "ready\n":
        raise RuntimeError("math-verify did not start; is `python -c 'import math_verify'` well?")
    return worker


NUM_WORKERS = min(8, os.cpu_count() or 1)
math.max_concurrent_calls = NUM_WORKERS  # type: ignore[attr-defined]  # a call that waits for a worker runs no clock

# A slot is None until a worker is needed; last in, first out, so that started workers are used again first.
_idle_workers: "queue.LifoQueue[subprocess.Popen[str] | None]" = queue.LifoQueue()
for _ in range(NUM_WORKERS):
    _idle_workers.put(None)
