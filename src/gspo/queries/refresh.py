"""Queries that change in the course of a run: of data files that are replaced, or as a function gives them."""

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.queries.source import RowSet, load_rows
from gspo.recipe.callables import error_line, load_callable
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import REPLACED_FILE


class Refresh:
    """Asks for a run's rows anew, before each step."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self.name = recipe, str(recipe.queries.refresh)
        self.call = None if self.name == REPLACED_FILE else load_callable(self.name, where="queries.refresh")
        self._seen: object = None

    def rows(self, step: int, before: RowSet) -> RowSet | None:
        """The rows from a step on, without those held out; None: the ones of before. UserError for none, or too few.

        A row of before keeps its id, and with it what is remembered of it.
        """
        given, seen = (None, self._files()) if self.call is None else (self._ask(step), None)
        if given is None and seen == self._seen:
            return None
        read, self._seen = load_rows(self._recipe, given, held_out=before.held_out).train, seen
        ids = {_content(row): row.id for row in before.train}
        new = [ids.get(_content(row)) or f"@{step}:".join(row.id.rsplit(":", 1)) for row in read]
        if new == [row.id for row in before.train]:
            return None
        train = (replace(row, id=own) for row, own in zip(read, new, strict=True))
        return from_text(to_text(replace(before, train=tuple(train))))  # as a resumed run has them

    def _files(self) -> list[object]:
        queries = self._recipe.queries
        paths = [Path(own.path) for own in (queries, *queries.sources.values()) if own.path]
        stats = [path.stat() for path in paths if path.is_file()]
        return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats]

    def _ask(self, step: int) -> Sequence[Mapping[str, Any]] | None:
        assert self.call is not None
        try:
            given = self.call(step)
        except Exception as error:
            what = f"it raises {type(error).__name__}: {error}{error_line(error, self.call)}"
            raise UserError(what, where=self.name, fix="mend it") from None
        if given is not None and (not isinstance(given, Sized) or isinstance(given, str | Mapping)):
            what = f"it returns {type(given).__name__}, and no list of rows or None"
            raise UserError(what, where=self.name, fix="mend it")
        return cast("Sequence[Mapping[str, Any]] | None", given)


def to_text(rows: RowSet) -> str:
    """The rows as a checkpoint holds them; of a value that JSON does not have, its text."""
    plain = [[{**vars(row), "columns": row.clean_columns} for row in own] for own in (rows.train, rows.held_out)]
    return json.dumps(plain, default=str)


def from_text(text: str) -> RowSet:
    """Return what `to_text` was given."""
    train, held_out = (tuple(Row(**row) for row in own) for own in json.loads(text))
    return RowSet(train=train, held_out=held_out)


def _content(row: Row) -> str:
    return json.dumps([row.source, row.prompt, row.clean_columns], default=str)
