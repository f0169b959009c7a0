"""Runs in memory, as they are read from the disk, and the data in a page."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tests.report.page.made_runs import Line, metrics_line, recipe

from gspo.metrics.numbers import numbers
from gspo.report.page.arms import Arm, arms_of
from gspo.report.run_files import RunFiles, State


def run_of(
    lines: Iterable[Line] = (),
    *,
    name: str = "made",
    settings: Mapping[str, Any] | None = None,
    history: Sequence[Line] = (),
    cold_start: Sequence[Line] = (),
    state: str = "finished",
    path: Path | None = None,
) -> RunFiles:
    """A run of these lines, null read as NaN."""
    return RunFiles(
        path=path or Path("runs", name),
        recipe={**recipe(name), **(settings or {})},
        lines=[numbers(line) for line in lines],
        cold_start=cold_start,
        history=history,
        state=cast(State, state),
        notes=[],
    )


def seeds_of(*runs: Sequence[Line]) -> Arm:
    """An arm of a run for each of these logs."""
    made = [run_of(lines, name=f"made-{number}", settings={"seed": number}) for number, lines in enumerate(runs)]
    (arm,) = arms_of(made)
    return arm


def steps_of(name: str, values: Sequence[Any], first: int = 1) -> list[Line]:
    """A line a step of one metric; a value `...` is of a step without it."""
    return [{"step": step, **({} if value is ... else {name: value})} for step, value in enumerate(values, start=first)]


def arms_with(**changes: Any) -> list[Arm]:
    """Two arms of two seeds each, of all metrics; changes are of the second one's recipe."""
    made = []
    for name, keys in (("base", {}), ("other", changes)):
        for seed in (0, 1):
            log = [metrics_line(step, seed) for step in range(7)]
            made.append(run_of(log, name=f"{name}-{seed}", settings={"seed": seed, **keys}))
    return arms_of(made)


def data_in(page: str) -> dict[str, Any]:
    """What the page's script draws."""
    return _json_of(page, "data")


def samples_in(page: str) -> Any:
    """What the page has of samples."""
    return _json_of(page, "samples-data")


def _json_of(page: str, name: str) -> Any:
    (text,) = re.findall(f'<script type="application/json" id="{name}">([^<]*)</script>', page)
    return json.loads(text)
