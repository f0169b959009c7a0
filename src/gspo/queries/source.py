"""The rows of a recipe: to train on, held out (no question is in both), and demonstrations for the cold start."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from gspo.errors import UserError
from gspo.queries.files import read_rows
from gspo.queries.procedural import procedural_rows
from gspo.queries.render import render_all
from gspo.queries.row import Row, lay_out
from gspo.recipe.callables import error_line, load_callable
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import QueriesConfig, names_file
from gspo.recipe.writable import writable
from gspo.types import Query

HELD_OUT_FRACTION = 0.1
# Not the recipe's seed: runs that differ in their seed are scored on the same questions.
HELD_OUT_SEED = 250718071
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

    Raises UserError where there are no rows, and where every row is held out.
    """
    queries, evaluation = recipe.queries, recipe.evaluation
    task = queries.procedural if rows is None else None
    data = _data_rows(queries, rows) if task is None else []
    if evaluation.path is not None and evaluation.num_queries:
        config = None if names_file(evaluation.path) else queries.config
        held_out = _read(evaluation.path, queries, config=config, split=evaluation.split, limit=evaluation.num_queries)
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
    if not train:
        what = f"no question is left to train on besides the {len(held_out)} held out for evaluation"
        fix = "give more data or a wider task, another evaluation.path, or a lower evaluation.num_queries"
        raise UserError(what, where="queries", fix=fix)
    return RowSet(train=tuple(train[: queries.limit]), held_out=tuple(held_out))


def _data_rows(queries: QueriesConfig, rows: Iterable[Mapping[str, Any]] | None) -> list[Row]:
    if rows is not None:
        return lay_out(list(rows), source="queries", prompt_column=queries.prompt)
    if queries.path is not None:
        return _read(queries.path, queries, config=queries.config, split=queries.split)
    fix = "set queries.path or queries.procedural.task, or give rows from Python"
    raise UserError("the recipe has no queries", where="queries", fix=fix)


def _read(path: str, queries: QueriesConfig, **options: Any) -> list[Row]:
    source = Path(path).name if names_file(path) else path
    return lay_out(read_rows(path, **options), source=source, prompt_column=queries.prompt)


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
