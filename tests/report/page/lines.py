"""Runs in memory, as they are read from the disk, and the data in a page."""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tests.report.page.made_runs import Line, recipe

from gspo.metrics.numbers import numbers
from gspo.report.run_files import RunFiles, State


def run_of(
    lines: Iterable[Line] = (),
    *,
    name: str = "made",
    settings: Mapping[str, Any] | None = None,
    history: Sequence[Line] = (),
    state: str = "finished",
    path: Path | None = None,
) -> RunFiles:
    """A run of these lines, null read as NaN."""
    return RunFiles(
        path=path or Path("runs", name),
        recipe={**recipe(name), **(settings or {})},
        lines=[numbers(line) for line in lines],
        cold_start=[],
        history=history,
        state=cast(State, state),
        notes=[],
    )


def steps_of(name: str, values: Sequence[Any], first: int = 1) -> list[Line]:
    """A line a step of one metric."""
    return [{"step": step, name: value} for step, value in enumerate(values, start=first)]


def data_in(page: str) -> dict[str, Any]:
    """What the page's script draws."""
    return _json_of(page, "data")


def sets_in(page: str) -> list[dict[str, Any]]:
    """The sets of samples that are in the page, each with its groups by step as `contents`."""
    carried = _json_of(page, "samples-data")
    contents = [{int(step): _unpacked(groups) for step, groups in own.items()} for own in carried["contents"]]
    return [{**index, "contents": own} for index, own in zip(_unpacked(carried["index"]), contents, strict=True)]


def _json_of(page: str, name: str) -> Any:
    (text,) = re.findall(f'<script type="application/json" id="{name}">([^<]*)</script>', page)
    return json.loads(text)


def _unpacked(letters: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(letters)))
