"""Built-in demonstrations: how a question is answered, bare or with the work shown."""

import random
from collections.abc import Mapping
from typing import Any

from gspo.errors import UserError


def chain_sum(row: Mapping[str, Any], rng: random.Random, *, worked_fraction: float = 0.5) -> str:
    """An answer to reasoning-gym's chain_sum: bare, or worked by running total with probability `worked_fraction`.

    `7 + 4 + 3` gives `<answer>14</answer>` or `7+4=11, 11+3=14 <answer>14</answer>`.
    Raises UserError for a row of another task.
    """
    if row.get("task") != "chain_sum" or "entry" not in row:
        fix = "set queries.procedural.task: chain_sum, or give a function of your own"
        raise UserError("this demonstrator answers the task chain_sum only", where="cold_start.demonstrations", fix=fix)
    bare = f"<answer>{row['entry']['answer']}</answer>"
    first, *rest = row["entry"]["metadata"]["expression"].split()
    total, steps = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        value = total + int(term) if operator == "+" else total - int(term)
        steps.append(f"{total}{operator}{term}={value}")
        total = value
    return f"{', '.join(steps)} {bare}" if steps and rng.random() < worked_fraction else bare
