"""Queries from reasoning-gym's procedural tasks: training rows by seed, held-out rows the same for every seed."""

import difflib
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.recipe.sections import MAX_DRAWN, ProceduralConfig

WHERE = "queries.procedural"
# reasoning-gym draws item i of a data set from Random(seed + i), so that seeds 0 and 1 share all items but one.
# Seeds are therefore spaced further apart than any data set is long; numpy, used by some tasks, ends at 2**32.
SEED_SPACING = 4 * MAX_DRAWN
NUM_SEEDS = 2**32 // SEED_SPACING
# A small task repeats itself: this many times the wanted rows are drawn before fewer are accepted.
MAX_DRAWS_PER_ROW = SEED_SPACING // MAX_DRAWN


def procedural_rows(
    config: ProceduralConfig, *, seed: int | None, size: int, excluded: Collection[str] = ()
) -> list[Row]:
    """Up to `size` distinct questions of a seed, none of which is excluded.

    Without a seed they are those that every seed holds out: they depend on the task and its options only.
    Raises UserError for an unknown task and for options that the task refuses.
    """
    slot = 0 if seed is None else 1 + seed % (NUM_SEEDS - 1)
    source = config.task if seed is not None else f"{config.task}-held-out"
    shared = {"task": config.task, "task_options": dict(config.model_extra or {})}
    rows: dict[str, Row] = {}
    draws = (
        _create_dataset(config, seed=slot * SEED_SPACING + draw * size, size=size)
        for draw in range(MAX_DRAWS_PER_ROW if size else 0)
    )
    for entry in (data[index] for data in draws for index in range(size)):
        question = entry["question"]
        if question not in excluded and question not in rows:
            columns = {"answer": entry["answer"], **shared, "entry": entry}
            row_id = f"{source}:{len(rows) + 1}"
            rows[question] = Row(id=row_id, prompt=question, columns=columns, is_procedural=True)
            if len(rows) == size:
                break
    return list(rows.values())


def _create_dataset(config: ProceduralConfig, *, seed: int, size: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    task, options = config.task, config.model_extra or {}
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        fix = f"did you mean {', '.join(near)}?" if near else "reasoning-gym's documentation lists its tasks"
        raise UserError(f"reasoning-gym has no task {task!r}", where=f"{WHERE}.task", fix=fix)
    if "seed" in options:
        raise UserError("the task's seed comes from the recipe's", where=f"{WHERE}.seed", fix="set `seed` at the top")
    names = [field.name for field in fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    try:
        return create_dataset(task, **options, seed=seed, size=size)
    except Exception as error:  # tasks check their options with assert, ValueError, TypeError, …
        fix = f"options of {task}: {', '.join(names)}"
        raise UserError(f"task {task} refuses its options: {error}", where=WHERE, fix=fix) from None
