"""The queries of a recipe: training and held-out, never the same question in both."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.queries import procedural
from gspo.queries.files import read_rows
from gspo.queries.layouts import lay_out
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.recipe.schema import QueriesConfig, Recipe
from gspo.recipe.sections import names_file
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
    """Training and held-out rows; `rows` given from Python stand in for queries.path and queries.procedural."""
    queries, num_held_out = recipe.queries, recipe.evaluation.num_queries
    task = queries.procedural if rows is None else None
    if recipe.evaluation.path is not None and num_held_out:
        held_out = _evaluation_rows(recipe)
    else:
        held_out = procedural.held_out_rows(task, size=num_held_out) if task else []
    if task:
        train = procedural.training_rows(task, seed=recipe.seed, held_out=held_out)
    else:
        train = _data_rows(queries, rows)
        if recipe.evaluation.path is None:
            held_out = _hold_out(train, num_held_out)
        train = _without(train, held_out)
    return RowSet(train=tuple(train[: queries.limit]), held_out=tuple(held_out))


def render_rows(rows: RowSet, tokenizer: Any, *, recipe: Recipe, max_positions: int | None) -> QuerySet:
    """Both sets of rows as the model reads them; prompts must leave rollout.max_new_tokens of the positions."""
    longest = None if max_positions is None else max_positions - recipe.rollout.max_new_tokens
    if longest is not None and longest < 1:
        raise UserError(
            f"rollout.max_new_tokens {recipe.rollout.max_new_tokens} leaves no room for a prompt in the model's "
            f"{max_positions} positions",
            where="rollout.max_new_tokens",
            fix="lower it",
        )
    train = render_all(rows.train, tokenizer, queries=recipe.queries, max_prompt_tokens=longest)
    held_out = render_all(rows.held_out, tokenizer, queries=recipe.queries, max_prompt_tokens=longest)
    return QuerySet(train=train, held_out=held_out)


def _data_rows(queries: QueriesConfig, rows: Iterable[Mapping[str, Any]] | None) -> list[Row]:
    if rows is not None:
        raw, source = [_as_row(row, number) for number, row in enumerate(rows, start=1)], "queries"
        if not raw:
            raise UserError("there are no rows", where=source, fix="give at least one row with a prompt")
    elif queries.path is not None:
        raw, source = read_rows(queries.path, config=queries.config, split=queries.split), _source_name(queries.path)
    else:
        fix = "set queries.path or queries.procedural.task, or give rows from Python"
        raise UserError("the recipe has no queries", where="queries", fix=fix)
    return lay_out(raw, source=source, prompt_column=queries.prompt)


def _as_row(row: Any, number: int) -> dict[str, Any]:
    if isinstance(row, Mapping):
        return dict(row)
    fix = 'give rows such as {"prompt": "...", "answer": "..."}'
    raise UserError(f"a row is a mapping of columns, not {str(row)[:60]!r}", where=f"queries:{number}", fix=fix)


def _evaluation_rows(recipe: Recipe) -> list[Row]:
    path = recipe.evaluation.path
    assert path is not None
    config = None if names_file(path) else recipe.queries.config
    raw = read_rows(path, config=config, split=recipe.evaluation.split, limit=recipe.evaluation.num_queries)
    return lay_out(raw, source=_source_name(path), prompt_column=recipe.queries.prompt)


def _source_name(path: str) -> str:
    return Path(path).name if names_file(path) else path


def _hold_out(rows: Sequence[Row], num_wanted: int) -> list[Row]:
    """A fixed draw of at most a tenth of the rows, at least one where any is wanted."""
    size = min(num_wanted, max(1, int(len(rows) * HELD_OUT_FRACTION)))
    return [rows[index] for index in sorted(random.Random(HELD_OUT_SEED).sample(range(len(rows)), size))]


def _without(rows: Sequence[Row], held_out: Sequence[Row]) -> list[Row]:
    known = {row.prompt_key for row in held_out}
    kept = [row for row in rows if row.prompt_key not in known]
    if not kept:
        fix = "give more data, another evaluation.path, or set evaluation.num_queries=0"
        raise UserError(
            f"all {len(rows)} rows are held out for evaluation: none is left to train on", where="queries", fix=fix
        )
    return kept
