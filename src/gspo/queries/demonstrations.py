"""The cold start's corpus: prompts with the completions the model first learns to imitate."""

import random
from typing import Any

from gspo.errors import UserError
from gspo.queries.files import read_rows
from gspo.queries.layouts import lay_out
from gspo.queries.row import Row
from gspo.queries.source import RowSet
from gspo.recipe.callables import error_line, load_callable
from gspo.recipe.schema import Recipe
from gspo.recipe.writable import writable

WHERE = "cold_start.demonstrations"


def load_demonstrations(recipe: Recipe, rows: RowSet) -> list[tuple[Row, str]]:
    """Up to cold_start.rows pairs of row and completion text, drawn by the recipe's seed.

    Raises UserError for a file without completions and for a demonstrator that fails or returns no text.
    """
    rng = random.Random(f"cold start {recipe.seed}")
    cold_start = recipe.cold_start
    if cold_start.path is not None:
        held_out = {row.prompt_key for row in rows.held_out}
        pairs = [pair for pair in _read_pairs(cold_start.path) if pair[0].prompt_key not in held_out]
        if not pairs:
            raise UserError("every prompt of the file is among those held out for evaluation", where="cold_start.path")
        return rng.sample(pairs, min(cold_start.rows, len(pairs)))
    if cold_start.demonstrations is None:
        fix = "set cold_start.path or cold_start.demonstrations"
        raise UserError("the recipe has no demonstrations", where="cold_start", fix=fix)
    demonstrate = load_callable(cold_start.demonstrations, where=WHERE)
    chosen = rng.sample(rows.train, min(cold_start.rows, len(rows.train)))
    return [(row, _demonstration(demonstrate, row, rng)) for row in chosen]


def _read_pairs(path: str) -> list[tuple[Row, str]]:
    rows = lay_out(read_rows(path), source=path, prompt_column=None)
    return [(row, _completion(row)) for row in rows]


def _completion(row: Row) -> str:
    """A completion as text, or as TRL's list of one assistant message."""
    completion = row.columns.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        completion = completion[0].get("content")
    if not isinstance(completion, str) or not completion or writable(completion) != completion:
        what = f"no text in column 'completion'; the other columns there are: {', '.join(row.columns)}"
        raise UserError(what, where=row.id, fix="give every row of cold_start.path a prompt and a completion")
    return completion


def _demonstration(demonstrate: Any, row: Row, rng: random.Random) -> str:
    try:
        completion = demonstrate({"prompt": row.prompt, **row.clean_columns}, rng)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, which would end the program with nothing said
        what = f"the function raises {type(error).__name__}: {error}{error_line(error, demonstrate)}"
        raise UserError(what, where=f"{WHERE}, row {row.id}", fix="it is called as f(row, rng)") from None
    if not isinstance(completion, str) or not completion or writable(completion) != completion:
        what = f"the function returns {repr(completion)[:80]} and not a text"
        raise UserError(what, where=f"{WHERE}, row {row.id}")
    return completion
