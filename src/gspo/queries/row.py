"""Rows of data before the tokenizer: from a file (JSONL, JSON, CSV, Parquet), the hub or Python, and from any layout.

`datasets` reads the hub only. Of files it would give a JSON row the other rows' keys, make dates of text and numbers of
CSV, leave lock files in the user's home, and read Parquet at a twentieth of pyarrow's speed.
"""

import csv
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.errors import UserError, files_beside, listed, writable
from gspo.queries.code_prompts import with_code_prompt
from gspo.recipe.sections import names_file
from gspo.types import Messages

RawRow = dict[str, Any]

# By precedence; matched without regard to case, since published sets write `Problem` and `Answer` too.
PROMPT_COLUMNS = ("prompt", "question", "problem")
_SAVE = "save the file as UTF-8"
# Columns that tell rows apart, and not questions.
_NAMES_ROWS = re.compile(
    r"((row|unique|problem|question|task|sample|example|data|prompt|item)_?)?(id|idx|index|u?uid|guid)|__index_level_\d+__",
    re.IGNORECASE,
)
GSM8K_ANSWER = re.compile(r"####\s*(?P<number>[^\n]*\S)\s*$")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question as the data has it.

    Example: Row(id="train.jsonl:1", prompt="1 + 1 =", columns={"answer": "2"}).
    """

    id: str  # "<source>:<row number>", counted from 1
    prompt: str | Messages
    columns: Mapping[str, Any] = field(default_factory=dict)  # what a resume compares
    source: str = ""  # of `queries.sources`
    is_procedural: bool = False  # made by reasoning-gym itself, not read from data
    num_repetitions: int = 0  # rows that were equal to it and are left out

    @property
    def clean_columns(self) -> Mapping[str, Any]:
        """The columns as functions get them and files hold them (see `writable`); UserError where they are too deep."""
        try:
            return dict(writable(self.columns))
        except RecursionError:
            raise UserError("its columns are nested too deeply", where=self.id, fix="flatten them") from None


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
    readers = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.is_dir():
        raise UserError("this is a directory", where=str(path), fix=files_beside(path / "file", *readers))
    if not path.is_file():
        raise UserError("no such file", where=str(path), fix=files_beside(path, *readers))
    if path.suffix.lower() not in readers:
        fix = f"use {', '.join(readers)}, or a hub id"
        raise UserError(f"unknown kind of file {path.suffix!r}", where=str(path), fix=fix)
    return readers[path.suffix.lower()](path)


def _read_json(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:  # bytes, so that only \n ends a line, and a line that is not UTF-8 has a number too
        if path.suffix.lower() == ".json":
            first, *others = file.read().strip().split(b"\n", 1)
            file.seek(0)
            if not others or b"[" in first[:4] or not first.rstrip().endswith(b"}"):  # else it has JSON lines
                yield from _parse(file.read(), kind=list, where=str(path))
                return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse(line.rstrip(), kind=dict, where=f"{path}, line {number}")


def _parse(data: bytes, *, kind: type, where: str) -> Any:
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_to_dict)
    except (ValueError, RecursionError) as error:  # also: not UTF-8, an integer of more than 4,300 digits
        what = f"not usable JSON: {str(error).replace('line 1 column', 'column')}"
        fix = "write this line's object anew, or leave it out" if kind is dict else "correct the file at that place"
        fix = _SAVE if isinstance(error, UnicodeDecodeError) else fix
        raise UserError(what, where=where, fix=fix) from None
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
            if isinstance(error, UnicodeDecodeError):  # of some line: it is decoded by blocks
                raise UserError(f"not usable CSV: {error}", where=str(path), fix=_SAVE) from None
            fix = "close the quotes of each value, also in lines before, and give every row all columns"
            raise UserError(f"not usable CSV: {error}", where=f"{path}, line {reader.line_num}", fix=fix) from None


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        _to_dict([(name, None) for name in file.schema_arrow.names])
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        fix = "save it as Parquet, or name it by what it is: .jsonl, .json or .csv"
        raise UserError(f"not a readable Parquet file: {error}", where=str(path), fix=fix) from None


def _read_hub(path: str, *, config: str | None, split: str) -> Any:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()  # the display says what is waited for
    try:
        return load_dataset(path, name=config, split=split)
    except Exception as error:  # the hub's client raises its own, httpx's, and the builtin kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "check the id, queries.config, queries.split, the network; or give a file (gspo eval: --data F.jsonl)"
        what = f"no such file, and as a hub data set it does not load: {reason}"
        raise UserError(what, where=path, fix=fix) from None


def lay_out(raw_rows: Sequence[Mapping[str, Any]], *, source: str, prompt_column: str | None = None) -> list[Row]:
    """Return rows with their prompt separated from the other columns; every row gets every column.

    The layouts of TRL, GSM8K, AIME, verl, LiveCodeBench, HumanEval and MBPP need no `prompt_column`.
    GSM8K: `answer` becomes the number behind ####, `solution` the worked text. verl: `answer` is the ground truth.
    Raises UserError where there are no rows, a row is no mapping, the prompt column is missing (the message names those
    there are), a prompt is not one, or columns that differ in case leave open which is meant.
    """
    if not raw_rows:
        raise UserError("the data has no rows", where=source, fix="give at least one row with a prompt")
    for number, raw in enumerate(raw_rows, start=1):
        if not isinstance(raw, Mapping):
            fix = 'give rows such as {"prompt": "...", "answer": "..."}: of a data frame, .to_dict("records")'
            raise UserError(f"a row is not {str(raw)[:60]!r}", where=f"{source}:{number}", fix=fix)
    if prompt_column is None and with_code_prompt(raw_rows[0]) is not None:
        raw_rows, prompt_column = _with_code_prompts(raw_rows, source=source), "prompt"
    names = list(dict.fromkeys(name for raw in raw_rows for name in raw))
    prompt_name = _column(names, *PROMPT_COLUMNS, source=source) if prompt_column is None else prompt_column
    if prompt_name is None or prompt_name not in names:
        missing = repr(prompt_column) if prompt_column is not None else ", ".join(PROMPT_COLUMNS)
        what = f"no column {missing}; the columns there are: {', '.join(names)}"
        raise UserError(
            what,
            where=source,
            fix="set queries.prompt, or that of the source, to the column with the text or chat messages",
        )
    answer_name = _column(names, "answer", source=source)
    first_answer = raw_rows[0].get(answer_name) if answer_name is not None else None
    is_gsm8k = prompt_name.lower() == "question" and _gsm8k_number(first_answer) is not None
    rows = []
    for number, raw in enumerate(raw_rows, start=1):
        row_id, columns = f"{source}:{number}", {name: raw.get(name) for name in names}
        where = f"{source}, row {number}"  # not its line: some are empty
        if prompt_name not in raw:
            raise UserError(f"it has no {prompt_name!r}", where=where, fix="give it one, or take it out")
        prompt = _checked_prompt(columns.pop(prompt_name), prompt_name, where=where)
        if answer_name is not None and answer_name in columns:
            columns["answer"] = columns.pop(answer_name)
        if is_gsm8k:
            worked, final_number = columns["answer"], _gsm8k_number(columns["answer"])
            if final_number is None:
                what = f"the first row's answer ends in '#### number' and this one does not: {str(worked)[-60:]!r}"
                raise UserError(what, where=row_id, fix="make the answers alike")
            columns["answer"] = final_number
            columns.setdefault("solution", worked)
        if isinstance(verl := columns.get("reward_model"), Mapping) and "ground_truth" in verl:
            columns.setdefault("answer", verl["ground_truth"])
        rows.append(Row(id=row_id, prompt=prompt, columns=columns))
    return rows


def distinct(rows: Iterable[Row]) -> list[Row]:
    """The rows, of those that are equal in prompt and columns the first, with how many are left out.

    Columns that tell rows apart, such as an index, do not count.
    """
    groups: dict[str, list[Row]] = {}
    # What JSON does not have is equal by its hash, or as the same object.
    identity = partial(json.dumps, default=lambda value: hash(value) if isinstance(value, Hashable) else id(value))
    for row in rows:
        groups.setdefault(identity([row.prompt, _without_names(row.clean_columns)]), []).append(row)
    return [replace(first, num_repetitions=len(others)) if others else first for first, *others in groups.values()]


def repetition_notes(rows: Sequence[Row], name: str) -> list[str]:
    """Return sentences about rows that others repeat, and about those with the same prompt that differ elsewhere."""
    groups, num_repetitions = dict[str, list[Row]](), sum(row.num_repetitions for row in rows)
    for row in rows:
        groups.setdefault(str(row.prompt), []).append(row)
    alike = [[_without_names(row.columns) for row in group] for group in groups.values() if len(group) > 1]
    pairs = [(first, other) for first, *others in alike for other in others]
    differing = dict.fromkeys(key for one, other in pairs for key in one if str(one[key]) != str(other.get(key)))
    which = "1 row is" if num_repetitions == 1 else f"{num_repetitions:,} rows are"
    left_out = f"{which} left out: each repeats one of the {len(rows):,} {name}"
    counts = f"{len(rows):,} {name} have {len(groups):,} different prompts"
    differ = f"{counts}; those with the same one differ in {listed([*differing]) or 'nothing'}"
    return [left_out] * bool(num_repetitions) + [differ] * bool(pairs)


def _without_names(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {str(name): _without_names(inner) for name, inner in value.items() if not _NAMES_ROWS.fullmatch(str(name))}


def _with_code_prompts(raw_rows: Sequence[Mapping[str, Any]], *, source: str) -> list[RawRow]:
    rows = []
    for number, raw in enumerate(raw_rows, start=1):
        if (row := with_code_prompt(raw)) is None:
            what = f"the first row is a programming problem and this one is not laid out alike: {', '.join(raw)}"
            raise UserError(what, where=f"{source}:{number}", fix="make the rows alike")
        rows.append(row)
    return rows


def _column(names: Sequence[str], *spellings: str, source: str) -> str | None:
    """The first of the spellings that is a column, perhaps in another case; UserError where several columns match."""
    for spelling in spellings:
        matches = [spelling] if spelling in names else [name for name in names if name.lower() == spelling]
        if len(matches) > 1:
            what = f"columns {' and '.join(matches)}: which of them is {spelling!r} cannot be told"
            raise UserError(what, where=source, fix="rename them")
        if matches:
            return matches[0]
    return None


def _gsm8k_number(answer: Any) -> str | None:
    match = GSM8K_ANSWER.search(answer) if isinstance(answer, str) else None
    return match and match["number"].replace(",", "")


def _checked_prompt(prompt: Any, name: str, *, where: str) -> str | Messages:
    try:
        is_readable = writable(prompt) == prompt
    except RecursionError:
        is_readable = False
    if is_readable and isinstance(prompt, str):
        return prompt
    messages = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, str | Mapping) else []
    if is_readable and messages and all(isinstance(message, Mapping) and "role" in message for message in messages):
        return [dict(message) for message in messages]
    fault = "half of a surrogate pair, a number that is not finite, or levels without end, which no tokenizer reads"
    if is_readable:
        fault = f"{repr(prompt)[:60]}: neither text nor a list of messages with a role and content"
    fix = "fix the row, or set queries.prompt to another column"
    raise UserError(f"column {name!r} holds {fault}", where=where, fix=fix)
