"""Rows from a file (JSONL, JSON, CSV, Parquet) or from the hub, as plain dictionaries."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.recipe.sections import names_file

RawRow = dict[str, Any]


def read_rows(path: str, *, config: str | None = None, split: str = "train", limit: int | None = None) -> list[RawRow]:
    """The first `limit` rows of a .jsonl, .json, .csv or .parquet file, or of a hub data set's `split`.

    Raises UserError for a missing file, an unreadable line (with its number), a column given twice, empty data and a
    hub that fails.
    """
    try:
        if not names_file(path):
            rows = _read_hub(path, config=config, split=split, limit=limit)
        elif config is not None:
            fix = "remove queries.config, or give a hub id as the path"
            raise UserError(f"a file has no configuration, and {config!r} is asked for", where=path, fix=fix)
        else:
            rows = list(islice(_reader(Path(path))(Path(path)), limit))
    except OSError as error:
        fix = "make it a file that you may read"
        raise UserError(f"cannot be read: {error.strerror or error}", where=path, fix=fix) from None
    if not rows:
        raise UserError("the data has no rows", where=path, fix="give a file with at least one row")
    return rows


def _reader(path: Path) -> Callable[[Path], Iterator[RawRow]]:
    if not path.is_file():
        near = sorted(str(near) for suffix in _READERS for near in path.parent.glob(f"*{suffix}"))
        fix = f"there are: {', '.join(near[:8])}" if near else "check the path; it is relative to the working directory"
        raise UserError("no such file", where=str(path), fix=fix)
    if path.suffix.lower() not in _READERS:
        fix = f"known: {', '.join(_READERS)}, or a hub id"
        raise UserError(f"unknown kind of file {path.suffix!r}", where=str(path), fix=fix)
    return _READERS[path.suffix.lower()]


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    # Bytes, so that a line that is not UTF-8 has a number too, and so that only \n ends a line.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _object(_parse(line, where=f"{path}, line {number}"), where=f"{path}, line {number}")


def _read_json(path: Path) -> Iterator[RawRow]:
    rows = _parse(path.read_bytes(), where=str(path))
    if not isinstance(rows, list):
        fix = "write [{...}, {...}]; one object a line belongs in a .jsonl file"
        raise UserError(f"a .json file is a list of objects, not a {type(rows).__name__}", where=str(path), fix=fix)
    for number, row in enumerate(rows, start=1):
        yield _object(row, where=f"{path}, row {number}")


def _parse(data: bytes, *, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=lambda pairs: _mapping(pairs, where=where))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {error.reason} at byte {error.start}", where=where) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"not valid JSON: {error.msg.removesuffix(' at')} at {place}", where=where) from None
    except RecursionError:
        raise UserError("not usable JSON: nested too deeply", where=where) from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise UserError(f"not usable JSON: {error}", where=where) from None


def _mapping(pairs: Sequence[tuple[str, Any]], *, where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        _check_distinct([key for key, _ in pairs], where=where)
    return found


def _check_distinct(names: Sequence[str], *, where: str) -> None:
    """UserError for a column or key that is there twice, of which one would be lost."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{twice!r} is given twice", where=where, fix="remove or rename one of the two")


def _object(row: Any, *, where: str) -> RawRow:
    if not isinstance(row, dict):
        raise UserError(f'a row is an object such as {{"prompt": ...}}, not {str(row)[:60]!r}', where=where)
    return row


def _read_csv(path: Path) -> Iterator[RawRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            _check_distinct(reader.fieldnames or (), where=f"{path}, line 1")
            for row in reader:
                if None in row or None in row.values():
                    what = f"the header has {len(reader.fieldnames or ())} columns and this row has more or fewer"
                    raise UserError(what, where=f"{path}, line {reader.line_num}", fix="quote values that hold commas")
                yield dict(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"not valid CSV: {error}", where=f"{path}, line {reader.line_num}") from None


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        _check_distinct(file.schema_arrow.names, where=str(path))
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise UserError(f"not a readable Parquet file: {error}", where=str(path)) from None


def _read_hub(path: str, *, config: str | None, split: str, limit: int | None) -> list[RawRow]:
    from datasets import load_dataset

    try:
        data = load_dataset(path, name=config, split=split)
    except Exception as error:  # the hub's client raises its own, httpx's, and the builtin kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "check the id, queries.config, queries.split and the network; a file's path ends in .jsonl, .json, …"
        raise UserError(
            f"no such file, and as a hub data set it does not load: {reason}", where=path, fix=fix
        ) from None
    return [dict(row) for row in (data if limit is None else data.select(range(min(limit, len(data)))))]


_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
