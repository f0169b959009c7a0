"""What holds of the page of every study."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def lines_of_tables(page: Path, tables: Mapping[str, Callable[[Any], str]], runs: Any) -> dict[str, list[str]]:
    """The lines of each table, which has its place in the page and as many columns in each line."""
    text, found = page.read_text(encoding="utf-8"), dict[str, list[str]]()
    for name, write in tables.items():
        assert f"<!-- {name} -->" in text and f"<!-- /{name} -->" in text, name
        found[name] = [line for line in write(runs).splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in found[name]}) <= 1, name
    return found
