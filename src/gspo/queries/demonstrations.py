"""Demonstrations for the cold start: rows, each with a completion for the model to imitate."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gspo.errors import UserError, writable
from gspo.queries.row import Row, lay_out, read_rows
from gspo.queries.source import RowSet
from gspo.recipe.callables import error_line, load_callable
from gspo.recipe.schema import Recipe

# A completion to be imitated: a text, or turns of the assistant and, between them, results of tools, as messages.
Demonstration = str | Sequence[Mapping[str, str]]


def load_demonstrations(recipe: Recipe, rows: RowSet) -> list[tuple[Row, Demonstration]]:
    """Draw up to cold_start.rows pairs of row and completion, for the model to imitate, drawn by the recipe's seed.

    Raises UserError for a file without completions and for a demonstrator that fails or returns no text.
    """
    cold_start, rng = recipe.cold_start, random.Random(f"cold start {recipe.seed}")
    has_turns = recipe.rollout.has_turns
    if cold_start.path is None:
        assert cold_start.demonstrations is not None  # the recipe has one of the two
        demonstrate = load_callable(cold_start.demonstrations, where="cold_start.demonstrations")
        # Of a stream the first rows: how many of it are read depends on the number of steps.
        drawn = rows.train if rows.num_streamed else rng.sample(rows.train, min(cold_start.rows, len(rows.train)))
        return [(row, _call(demonstrate, row, rng, has_turns=has_turns)) for row in drawn[: cold_start.rows]]
    held_out = {str(row.prompt) for row in rows.held_out}
    from_file = lay_out(read_rows(cold_start.path), source=cold_start.path)
    columns = ", ".join(from_file[0].columns)
    fix = f"give every row a prompt and a text in the column 'completion'; the other columns there are: {columns}"
    read = partial(_demonstration, has_turns=has_turns, fix=fix)
    pairs = [(row, read(row.columns.get("completion"), where=row.id)) for row in from_file]
    pairs = [(row, completion) for row, completion in pairs if str(row.prompt) not in held_out]
    if not pairs:
        raise UserError("every prompt of the file is among those held out for evaluation", where="cold_start.path")
    return rng.sample(pairs, min(cold_start.rows, len(pairs)))


def _call(demonstrate: Callable[..., Any], row: Row, rng: random.Random, *, has_turns: bool) -> Demonstration:
    where, fix = f"cold_start.demonstrations, row {row.id}", "the function is called as f(row, rng) and returns a text"
    try:
        completion = demonstrate({"prompt": row.prompt, **row.clean_columns}, rng)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, which would end the program without a message
        what = f"the function raises {type(error).__name__}: {error}{error_line(error, demonstrate)}"
        raise UserError(what, where=where, fix=fix) from None
    return _demonstration(completion, has_turns=has_turns, where=where, fix=fix)


def _demonstration(completion: Any, *, has_turns: bool, where: str, fix: str) -> Demonstration:
    """A completion as text, as TRL's list of one assistant message, or as messages of a conversation with tools."""
    if not isinstance(completion, list) or not all(isinstance(message, dict) for message in completion):
        return _text(completion, where=where, fix=fix)
    texts = [_text(message.get("content"), where=where, fix=fix) for message in completion]
    if len(texts) == 1:
        return texts[0]
    roles = [str(message.get("role")) for message in completion]
    if not re.fullmatch("assistant (((tool )+|user )assistant )+", " ".join([*roles, ""])):
        what = f"the completion has messages of the roles {', '.join(roles)}"
        fix = "write assistant, tool, assistant, with one or more of tool each time, or assistant, user, assistant"
        raise UserError(what, where=where, fix=fix)
    if not has_turns:
        fix = "set rollout.tools or rollout.environment, or give a text"
        raise UserError("the completion has several turns", where=where, fix=fix)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def _text(completion: Any, *, where: str, fix: str) -> str:
    if not isinstance(completion, str) or not completion or writable(completion) != completion:
        raise UserError(f"the completion is {repr(completion)[:80]} and not a text", where=where, fix=fix)
    return completion
