"""Rows from a file (JSONL, JSON, CSV, Parquet) or from the hub, as plain dictionaries.

`datasets` reads the hub only. Of files it would give a JSON row the other rows' keys, make dates of text and numbers of
CSV, leave lock files in the user's home, and read Parquet at a twentieth of pyarrow's speed.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.errors import UserError, files_beside
from gspo.recipe.sections import names_file

RawRow = dict[str, Any]


def read_rows(path: str, *, config: str | None = None, split: str = "train", limit: int | None = None) -> list[RawRow]:
    """The first `limit` rows of a .jsonl, .json, .csv or .parquet file, or of a hub data set's `config` and `split`.

    Raises UserError for a missing file, an unreadable line (with its number), a column given twice and a failing hub.
    """
    try:
        source = _read_file(Path(path)) if names_file(path) else _read_hub(path, config=config, split=split)
        return list(islice(source, limit))
    except OSError as error:
        fix = "make it a file that you may read"
        raise UserError(f"cannot be read: {error.strerror or error}", where=path, fix=fix) from None


def _read_file(path: Path) -> Iterator[RawRow]:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    if not path.is_file():
        raise UserError("no such file", where=str(path), fix=files_beside(path, *readers))
    if path.suffix.lower() not in readers:
        fix = f"use {', '.join(readers)}, or a hub id"
        raise UserError(f"unknown kind of file {path.suffix!r}", where=str(path), fix=fix)
    return readers[path.suffix.lower()](path)


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:  # bytes, so that only \n ends a line, and a line that is not UTF-8 has a number too
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse(line, kind=dict, where=f"{path}, line {number}")


def _read_json(path: Path) -> Iterator[RawRow]:
    return iter(_parse(path.read_bytes(), kind=list, where=str(path)))


def _parse(data: bytes, *, kind: type, where: str) -> Any:
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_to_dict)
    except (ValueError, RecursionError) as error:  # also: not UTF-8, an integer of more than 4,300 digits
        raise UserError(f"not usable JSON: {str(error).replace('line 1 column', 'column')}", where=where) from None
    if not isinstance(value, kind):
        fix = 'write an object such as {"prompt": ...} a line in a .jsonl file, a list of such objects in a .json file'
        raise UserError(f"not {'an object' if kind is dict else 'a list of objects'}", where=where, fix=fix)
    return value


def _to_dict(pairs: Sequence[tuple[str, Any]]) -> RawRow:
    """The pairs as a dictionary; ValueError for a name given twice, since one of the values would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice")
    return row


def _read_csv(path: Path) -> Iterator[RawRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
            for values in filter(None, reader):
                if len(values) != len(names):
                    raise ValueError(f"{len(values)} values for {len(names)} columns; values with commas need quotes")
                yield _to_dict(list(zip(names, values, strict=True)))
        except (csv.Error, ValueError) as error:  # ValueError: text that is not UTF-8, too
            raise UserError(f"not usable CSV: {error}", where=f"{path}, line {reader.line_num}") from None


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        _to_dict([(name, None) for name in file.schema_arrow.names])
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise UserError(f"not a readable Parquet file: {error}", where=str(path)) from None


def _read_hub(path: str, *, config: str | None, split: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(path, name=config, split=split)
    except Exception as error:  # the hub's client raises its own, httpx's, and the builtin kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "check the id, queries.config, queries.split and the network; a file's path ends in .jsonl, .json, …"
        what = f"no such file, and as a hub data set it does not load: {reason}"
        raise UserError(what, where=path, fix=fix) from None
