"""The rows of a recipe: to train on, held out (no question is in both), and demonstrations for the cold start."""

import difflib
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from gspo.errors import UserError, writable
from gspo.queries.render import render_all
from gspo.queries.row import Row, lay_out, read_rows
from gspo.recipe.callables import error_line, load_callable
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import MAX_DRAWN, ProceduralConfig, QueriesConfig, names_file
from gspo.types import Query

HELD_OUT_FRACTION = 0.1
# Not the recipe's seed: runs that differ in their seed are scored on the same questions.
HELD_OUT_SEED = 250718071
# reasoning-gym draws item i of a data set from Random(seed + i), so that seeds 0 and 1 share all items but one.
# Seeds are therefore spaced further apart than any data set is long; numpy, used by some tasks, ends at 2**32.
SEED_SPACING = 4 * MAX_DRAWN
NUM_SEEDS = 2**32 // SEED_SPACING
# A small task repeats itself: this many times the wanted rows are drawn before fewer are accepted.
MAX_DRAWS_PER_ROW = SEED_SPACING // MAX_DRAWN
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Split(Generic[T]):
    """What is trained on, and what only the evaluation asks: rows before the tokenizer, queries after it.

    Example: RowSet(train=(Row(id="data:2", prompt="1+1="),), held_out=(Row(id="data:1", prompt="2+2="),)).
    """

    train: tuple[T, ...]
    held_out: tuple[T, ...]


RowSet = Split[Row]
QuerySet = Split[Query]


def load_rows(recipe: Recipe, rows: Iterable[Mapping[str, Any]] | None = None) -> RowSet:
    """Training and held-out rows; `rows` given from Python stand in for queries.path and queries.procedural.

    Raises UserError where there are no rows, and where those not held out are too few for a step.
    """
    queries, evaluation = recipe.queries, recipe.evaluation
    task = queries.procedural if rows is None else None
    data = _data_rows(queries, rows) if task is None else []
    if evaluation.path is not None and evaluation.num_queries:
        held_out = _read(evaluation.path, queries, split=evaluation.split, limit=evaluation.num_queries)
    elif task is not None:
        held_out = procedural_rows(task, seed=None, size=evaluation.num_queries)
    else:
        # A fixed draw of at most a tenth of the rows, at least one where any is asked for.
        size = min(evaluation.num_queries, max(1, int(len(data) * HELD_OUT_FRACTION)))
        held_out = [data[index] for index in sorted(random.Random(HELD_OUT_SEED).sample(range(len(data)), size))]
    excluded = {str(row.prompt) for row in held_out}
    if task is not None:
        train = procedural_rows(task, seed=recipe.seed, size=task.size, excluded=excluded)
    else:
        train = [row for row in data if str(row.prompt) not in excluded]
    train, needed = train[: queries.limit], recipe.rollout.queries_per_step
    if len(train) < needed:
        what = f"a step takes {needed} different queries and the data has {len(train)} for training"
        fix = "lower rollout.queries_per_step or evaluation.num_queries, give more data, or a wider task"
        raise UserError(f"{what}, besides {len(held_out)} held out for evaluation", where="queries", fix=fix)
    return RowSet(train=tuple(train), held_out=tuple(held_out))


def _data_rows(queries: QueriesConfig, rows: Iterable[Mapping[str, Any]] | None) -> list[Row]:
    if rows is not None:
        given = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, str) else [rows]
        return lay_out(given, source="queries", prompt_column=queries.prompt)
    if queries.path is not None:
        return _read(queries.path, queries, split=queries.split)
    fix = "set queries.path or queries.procedural.task, or give rows from Python"
    raise UserError("the recipe has no queries", where="queries", fix=fix)


def _read(path: str, queries: QueriesConfig, *, split: str, limit: int | None = None) -> list[Row]:
    raw_rows = read_rows(path, config=queries.config, split=split, limit=limit)
    return lay_out(raw_rows, source=Path(path).name if names_file(path) else path, prompt_column=queries.prompt)


def procedural_rows(
    config: ProceduralConfig, *, seed: int | None, size: int, excluded: Collection[str] = ()
) -> list[Row]:
    """Up to `size` distinct questions of a seed from a task of reasoning-gym, none of which is excluded.

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

    task, options, where = config.task, config.model_extra or {}, "queries.procedural"
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        fix = f"did you mean {', '.join(near)}?" if near else "reasoning-gym's documentation lists its tasks"
        raise UserError(f"reasoning-gym has no task {task!r}", where=f"{where}.task", fix=fix)
    if "seed" in options:
        raise UserError("the task's seed comes from the recipe's", where=f"{where}.seed", fix="set `seed` at the top")
    try:
        return create_dataset(task, **options, seed=seed, size=size)
    except Exception as error:  # tasks check their options with assert, ValueError, TypeError, …
        names = [field.name for field in fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
        fix = f"options of {task}: {', '.join(names)}"
        raise UserError(f"task {task} refuses its options: {error}", where=where, fix=fix) from None


def render_rows(rows: RowSet, tokenizer: Any, *, recipe: Recipe, max_positions: int | None) -> QuerySet:
    """Both sets of rows as the model reads them; prompts must leave rollout.max_new_tokens of the positions."""
    longest = None if max_positions is None else max_positions - recipe.rollout.max_new_tokens
    render = partial(render_all, tokenizer=tokenizer, queries=recipe.queries, max_prompt_tokens=longest)
    return QuerySet(train=render(rows.train), held_out=render(rows.held_out))


def load_demonstrations(recipe: Recipe, rows: RowSet) -> list[tuple[Row, str]]:
    """Up to cold_start.rows pairs of row and completion, for the model to imitate, drawn by the recipe's seed.

    Raises UserError for a file without completions and for a demonstrator that fails or returns no text.
    """
    cold_start, rng = recipe.cold_start, random.Random(f"cold start {recipe.seed}")
    if cold_start.path is None:
        assert cold_start.demonstrations is not None  # the recipe has one of the two
        demonstrate = load_callable(cold_start.demonstrations, where="cold_start.demonstrations")
        drawn = rng.sample(rows.train, min(cold_start.rows, len(rows.train)))
        return [(row, _call(demonstrate, row, rng)) for row in drawn]
    held_out = {str(row.prompt) for row in rows.held_out}
    from_file = lay_out(read_rows(cold_start.path), source=cold_start.path)
    columns = ", ".join(from_file[0].columns)
    fix = f"give every row a prompt and a text in the column 'completion'; the other columns there are: {columns}"
    pairs = [(row, _text(row.columns.get("completion"), where=row.id, fix=fix)) for row in from_file]
    pairs = [(row, completion) for row, completion in pairs if str(row.prompt) not in held_out]
    if not pairs:
        raise UserError("every prompt of the file is among those held out for evaluation", where="cold_start.path")
    return rng.sample(pairs, min(cold_start.rows, len(pairs)))


def _call(demonstrate: Callable[..., Any], row: Row, rng: random.Random) -> str:
    where, fix = f"cold_start.demonstrations, row {row.id}", "the function is called as f(row, rng) and returns a text"
    try:
        completion = demonstrate({"prompt": row.prompt, **row.clean_columns}, rng)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, which would end the program without a message
        what = f"the function raises {type(error).__name__}: {error}{error_line(error, demonstrate)}"
        raise UserError(what, where=where, fix=fix) from None
    return _text(completion, where=where, fix=fix)


def _text(completion: Any, *, where: str, fix: str) -> str:
    """A completion as text, or as TRL's list of one assistant message."""
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        completion = completion[0].get("content")
    if not isinstance(completion, str) or not completion or writable(completion) != completion:
        raise UserError(f"the completion is {repr(completion)[:80]} and not a text", where=where, fix=fix)
    return completion
