"""Demonstrations for reasoning-gym's gsm_symbolic: the worked solution that comes with each question."""

import random
from collections.abc import Mapping
from typing import Any

from gspo.errors import UserError


def worked(row: Mapping[str, Any], rng: random.Random, *, bare_fraction: float = 0.5) -> str:
    """The solution, closed by `<answer>…</answer>`; with probability `bare_fraction` that alone.

    Raises UserError for a row of another task.
    """
    try:
        answer, solution = row["entry"]["answer"], row["entry"]["metadata"]["answer_cot"]
    except (KeyError, TypeError):
        raise UserError(
            "this demonstrator answers tasks with worked solutions only",
            where="cold_start.demonstrations",
            fix="set queries.procedural.task: gsm_symbolic, or give a function of your own",
        ) from None
    bare = f"<answer>{answer}</answer>"
    # The solution's own last line, `#### 288` or `#### 288.0`, is the answer as GSM8K writes it.
    steps = solution.rpartition("####")[0].rstrip()
    return f"{steps}\n{bare}" if steps and rng.random() >= bare_fraction else bare
