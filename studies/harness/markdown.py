"""Tables in markdown, and their places in a page."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from studies.harness.results import Results
from studies.harness.summary import Measure, deviation, mean, over_seeds

NONE = "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A line a row."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines])


def number(value: float, form: str = ".3f") -> str:
    """A dash for one that does not exist."""
    return format(value, form) if math.isfinite(value) else NONE


def spread(runs: Results, measure: Measure) -> str:
    """Mean ± standard deviation over the seeds, to the digits that the mean's size asks for."""
    values = over_seeds(runs, measure)
    centre, deviates = mean(values), deviation(values)
    if math.isnan(centre):
        return NONE
    form = ".1f" if abs(centre) >= 10 else ".3f" if abs(centre) >= 0.01 else ".1g"
    return f"{centre:{form}} ± {deviates:{form}}" if math.isfinite(deviates) else f"{centre:{form}}"


def write_tables(page: Path, output: Path, tables: Mapping[str, str]) -> None:
    """The page, with each table between its markers, into a folder."""
    text = page.read_text(encoding="utf-8")
    for name, content in tables.items():
        text = _put(text, page.name, name, content)
    (output / page.name).write_text(text, encoding="utf-8")


def _put(text: str, page: str, name: str, content: str) -> str:
    """The text with what stands between `<!-- name -->` and `<!-- /name -->` replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{page} has no place for the table {name}: <!-- {name} --> … <!-- /{name} -->")
    return pattern.sub(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text)
