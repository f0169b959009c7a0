"""Queries from reasoning-gym's procedural tasks: training rows by seed, held-out rows the same for every seed."""

import difflib
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.recipe.schema import ProceduralConfig
from gspo.recipe.sections import MAX_DRAWN

WHERE = "queries.procedural"
# reasoning-gym draws item i of a data set from Random(seed + i), so that seeds 0 and 1 share all items but one.
# Seeds are therefore spaced further apart than any data set is long; numpy, used by some tasks, ends at 2**32.
SEED_SPACING = 4 * MAX_DRAWN
NUM_SEEDS = 2**32 // SEED_SPACING
# A small task repeats itself: this many times the wanted rows are drawn before fewer are accepted.
MAX_DRAWS_PER_ROW = SEED_SPACING // MAX_DRAWN


def training_rows(procedural: ProceduralConfig, *, seed: int, held_out: Collection[Row] = ()) -> list[Row]:
    """Up to `procedural.size` distinct questions of the recipe's seed, none of which is held out.

    Raises UserError for an unknown task, options the task refuses, and a task too small to leave any question.
    """
    slot = 1 + seed % (NUM_SEEDS - 1)
    known = {row.prompt_key for row in held_out}
    rows = _distinct_rows(procedural, source=procedural.task, slot=slot, size=procedural.size, excluded=known)
    if not rows:
        raise UserError(
            f"task {procedural.task} has no question that is not among the {len(held_out)} held out",
            where=WHERE,
            fix="lower evaluation.num_queries, or widen the task's options",
        )
    return rows


def held_out_rows(procedural: ProceduralConfig, *, size: int) -> list[Row]:
    """Up to `size` distinct questions that depend on the task and its options only, not on the recipe's seed."""
    return _distinct_rows(procedural, source=f"{procedural.task}-held-out", slot=0, size=size, excluded=set())


def _distinct_rows(procedural: ProceduralConfig, *, source: str, slot: int, size: int, excluded: set[str]) -> list[Row]:
    """The first `size` questions of a seed slot that are new."""
    options = _checked_options(procedural)
    seen = set(excluded)
    rows: list[Row] = []
    for entry in _entries(procedural.task, options, first_seed=slot * SEED_SPACING, block=size):
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        columns = {"answer": entry["answer"], "task": procedural.task, "task_options": options, "entry": entry}
        row_id = f"{source}:{len(rows) + 1}"
        rows.append(Row(id=row_id, prompt=entry["question"], columns=columns, is_procedural=True))
        if len(rows) == size:
            break
    return rows


def _entries(task: str, options: dict[str, Any], *, first_seed: int, block: int) -> Iterator[dict[str, Any]]:
    for number in range(MAX_DRAWS_PER_ROW if block else 0):
        data = _create(task, {**options, "seed": first_seed + number * block, "size": block})
        for index in range(block):
            yield data[index]


def _create(task: str, options: dict[str, Any]) -> Any:
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(task, **options)
    except Exception as error:  # tasks check their options with assert, ValueError, TypeError, …
        raise UserError(f"task {task} refuses its options: {error}", where=WHERE, fix=_options_line(task)) from None


def _checked_options(procedural: ProceduralConfig) -> dict[str, Any]:
    """The task's own options; UserError where the task or an option's name is unknown."""
    from reasoning_gym.factory import DATASETS

    task, options = procedural.task, dict(procedural.model_extra or {})
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        fix = f"did you mean {', '.join(near)}?" if near else "reasoning-gym's documentation lists its tasks"
        raise UserError(f"reasoning-gym has no task {task!r}", where=f"{WHERE}.task", fix=fix)
    if "seed" in options:
        raise UserError("the task's seed comes from the recipe's", where=f"{WHERE}.seed", fix="set `seed` at the top")
    for name in options:
        if name not in _option_names(task):
            raise UserError(f"task {task} has no option {name!r}", where=f"{WHERE}.{name}", fix=_options_line(task))
    return options


def _option_names(task: str) -> list[str]:
    from reasoning_gym.factory import DATASETS

    return [field.name for field in fields(DATASETS[task][1]) if field.name not in ("seed", "size")]


def _options_line(task: str) -> str:
    return f"options of {task}: {', '.join(_option_names(task))}"
