"""The rows of a recipe: to train on, held out (no question is in both), and demonstrations for the cold start."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.queries.files import read_rows
from gspo.queries.procedural import procedural_rows
from gspo.queries.render import render_all
from gspo.queries.row import Row, lay_out
from gspo.recipe.callables import error_line, load_callable
from gspo.recipe.schema import ProceduralConfig, QueriesConfig, Recipe
from gspo.recipe.section import names_file
from gspo.recipe.writable import writable
from gspo.types import Query

HELD_OUT_FRACTION = 0.1
# Not the recipe's seed: runs that differ in their seed are scored on the same questions.
HELD_OUT_SEED = 250718071


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """Rows before the tokenizer, which may be fitted on them."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class QuerySet:
    """Rendered and tokenised queries."""

    train: tuple[Query, ...]
    held_out: tuple[Query, ...]


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
        held_out = _procedural_rows(task, seed=None, size=evaluation.num_queries)
    else:
        # A fixed draw of at most a tenth of the rows, at least one where any is asked for.
        size = min(evaluation.num_queries, max(1, int(len(data) * HELD_OUT_FRACTION)))
        held_out = [data[index] for index in sorted(random.Random(HELD_OUT_SEED).sample(range(len(data)), size))]
    excluded = {row.prompt_key for row in held_out}
    if task is not None:
        train = _procedural_rows(task, seed=recipe.seed, size=task.size, excluded=excluded)
    else:
        train = [row for row in data if row.prompt_key not in excluded]
    if not train:
        what = f"no question is left to train on besides the {len(held_out)} held out for evaluation"
        fix = "give more data or a wider task, another evaluation.path, or a lower evaluation.num_queries"
        raise UserError(what, where="queries", fix=fix)
    return RowSet(train=tuple(train[: queries.limit]), held_out=tuple(held_out))


def _procedural_rows(
    task: ProceduralConfig, *, seed: int | None, size: int, excluded: Collection[str] = ()
) -> list[Row]:
    source = f"{task.task}-held-out" if seed is None else task.task
    raw_rows = enumerate(procedural_rows(task, seed=seed, size=size, excluded=excluded), start=1)
    return [Row(id=f"{source}:{n}", prompt=raw.pop("prompt"), columns=raw, is_procedural=True) for n, raw in raw_rows]


def _data_rows(queries: QueriesConfig, rows: Iterable[Mapping[str, Any]] | None) -> list[Row]:
    if rows is not None:
        if not (raw_rows := list(rows)):
            raise UserError("there are no rows", where="queries", fix="give at least one row with a prompt")
        return lay_out(raw_rows, source="queries", prompt_column=queries.prompt)
    if queries.path is None:
        fix = "set queries.path or queries.procedural.task, or give rows from Python"
        raise UserError("the recipe has no queries", where="queries", fix=fix)
    return _read(queries.path, queries, config=queries.config, split=queries.split)


def _read(path: str, queries: QueriesConfig, **options: Any) -> list[Row]:
    source = Path(path).name if names_file(path) else path
    return lay_out(read_rows(path, **options), source=source, prompt_column=queries.prompt)


def render_rows(rows: RowSet, tokenizer: Any, *, recipe: Recipe, max_positions: int | None) -> QuerySet:
    """Both sets of rows as the model reads them; prompts must leave rollout.max_new_tokens of the positions."""
    longest = None if max_positions is None else max_positions - recipe.rollout.max_new_tokens
    train, held_out = (
        render_all(part, tokenizer, queries=recipe.queries, max_prompt_tokens=longest)
        for part in (rows.train, rows.held_out)
    )
    return QuerySet(train=train, held_out=held_out)


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
    held_out = {row.prompt_key for row in rows.held_out}
    pairs = [(row, _completion(row)) for row in lay_out(read_rows(cold_start.path), source=cold_start.path)]
    pairs = [(row, completion) for row, completion in pairs if row.prompt_key not in held_out]
    if not pairs:
        raise UserError("every prompt of the file is among those held out for evaluation", where="cold_start.path")
    return rng.sample(pairs, min(cold_start.rows, len(pairs)))


def _completion(row: Row) -> str:
    """A completion as text, or as TRL's list of one assistant message."""
    completion = row.columns.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        completion = completion[0].get("content")
    if _is_text(completion):
        return str(completion)
    what = f"no text in column 'completion'; the other columns there are: {', '.join(row.columns)}"
    raise UserError(what, where=row.id, fix="give every row of cold_start.path a prompt and a completion")


def _call(demonstrate: Callable[..., Any], row: Row, rng: random.Random) -> str:
    where, fix = f"cold_start.demonstrations, row {row.id}", "the function is called as f(row, rng) and returns a text"
    try:
        completion = demonstrate({"prompt": row.prompt, **row.clean_columns}, rng)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, which would end the program without a message
        what = f"the function raises {type(error).__name__}: {error}{error_line(error, demonstrate)}"
        raise UserError(what, where=where, fix=fix) from None
    if not _is_text(completion):
        raise UserError(f"the function returns {repr(completion)[:80]} and not a text", where=where, fix=fix)
    return str(completion)


def _is_text(completion: Any) -> bool:
    return isinstance(completion, str) and completion != "" and writable(completion) is completion
