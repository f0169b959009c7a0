"""Text that a model has written, in Markdown that shows it as it is."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows with the same columns; what would mean something to Markdown or HTML is shown, not done."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_cell(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_code(text: str) -> str:
    """Text in the type of code, its lines as they are."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return "".join(map(_character, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else _cell(str(value))


def _character(character: str) -> str:
    if character == "\n":
        return "<br>"
    if unicodedata.category(character) in ("Cc", "Zl", "Zp"):  # others may end a line, or mean something to a parser
        return f"&lt;{ord(character):02X}&gt;"
    return character if character.isalnum() or character == " " or ord(character) > 127 else f"&#{ord(character)};"
