"""Which of reasoning-gym's tasks data may name: none whose verifier evaluates text, which would be the data's."""

import re
from collections.abc import Sequence

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.reward.builtin import reasoning_gym
from gspo.reward.functions import RewardFunction

# By what their verifiers evaluate as Python: the answer, something in the entry, or whatever another task's does.
EVALUATING_TASKS = frozenset(
    re.findall(
        r"\w+",
        "binary_matrix bitwise_arithmetic composite countdown intermediate_integration n_queens number_sorting "
        "polynomial_multiplication puzzle24 simple_integration spiral_matrix string_insertion",
    )
)


def check_origin(rows: Sequence[Row], functions: Sequence[RewardFunction]) -> None:
    """UserError for a row of data, from a file or from Python, whose task's verifier evaluates text; calls nothing."""
    for function in functions:
        if function.call is not reasoning_gym:
            continue
        for row in rows:
            task = row.columns.get("task")
            named = EVALUATING_TASKS.intersection([task] if isinstance(task, str) else _texts(task))
            if named and not row.is_procedural:
                what = (
                    f"task {min(named)}: reasoning-gym's verifier of it evaluates text as Python or sympy, and in data "
                    "that text could be any program"
                )
                fix = "give queries.procedural.task instead of data, or use a task whose verifier only reads"
                raise UserError(what, where=f"reward function {function.name}, row {row.id}", fix=fix)


def _texts(task: object) -> list[str]:
    return [entry for entry in task if isinstance(entry, str)] if isinstance(task, list | tuple) else []
