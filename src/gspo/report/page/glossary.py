"""The definitions of the metrics, from the package's copy of docs/metrics.md: what a chart's title leads to."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_CELLS = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One metric: markdown, of which the page shows `code` as such."""

    definition: str
    healthy: str


@cache
def glossary() -> Mapping[str, Entry]:
    """Every metric of metrics.jsonl by the name that the table gives it, such as `evaluation/<set>/pass_at_1`."""
    text = files("gspo.report.page").joinpath("assets", "metrics.md").read_text(encoding="utf-8")
    found = {}
    for line in text.splitlines():
        cells = [cell.replace("\\|", "|").replace("\\\\", "\\").strip() for cell in _CELLS.split(line.strip())[1:-1]]
        if (
            len(cells) == 3
            and re.fullmatch(r"`[a-z_]+(/[^`]+)?`", cells[0])
            and ("/" in cells[0] or cells[0] == "`step`")
        ):
            found[cells[0].strip("`")] = Entry(definition=cells[1], healthy=cells[2])
    return found


def general_name(metric: str) -> str:
    """The glossary's name of a metric: an evaluation's set and a reward's function are any."""
    metric = re.sub(r"^evaluation/.+/[^/]+/mean$", "evaluation/<set>/<function>/mean", metric)
    metric = re.sub(r"^evaluation/.+?(/<function>/mean|/[^/]+)$", r"evaluation/<set>\1", metric)
    return re.sub(r"^reward/.+/(mean|seconds)$", r"reward/<function>/\1", metric)


def anchor(metric: str) -> str:
    """The id of a metric's definition on the page."""
    return "metric-" + re.sub(r"[^a-z0-9_]+", "-", general_name(metric)).strip("-")
