"""The runs as the page's JSON: a column of numbers for each metric, arms, recipes, and each run in words."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

from gspo.metrics.definitions import definition_of, general_name
from gspo.metrics.numbers import is_number
from gspo.metrics.words import measures
from gspo.report.page.arms import arms_of, differences
from gspo.report.page.overview import overview, rerun_command
from gspo.report.run_files import RunFiles
from gspo.report.shapes import section
from gspo.run.plain_files import content_of

MOST_STEPS = 2000  # on the page; of a longer run every second, third, … step
MOST_CURVES = 32  # of a list of numbers; of a longer list every second, third, … number
MOST_LOSSES = 500  # of the cold start

Line = Mapping[str, Any]
Place = tuple[int, ...]  # of a number in a list, or in a list of lists; empty: the metric is no list


def run_data(runs: Sequence[RunFiles], *, live: bool = False, reload_seconds: float | None = None) -> dict[str, Any]:
    """All that the page shows but the samples. `live`: the page fetches it again from its server."""
    arms, steps, places = arms_of(runs), _kept_steps(runs), _places(runs)
    return {
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "live": live,
        "reload_seconds": reload_seconds,
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        "runs": [_run(run, label, steps, places) for run, label in zip(runs, labels_of(runs), strict=True)],
        "arms": [{"label": arm.label, "runs": [runs.index(run) for run in arm.runs]} for arm in arms],
        "differences": differences(arms) if len(arms) > 1 else [],
        "lists": {name: [column_name("", place) for place in kept] for name, kept in places.items() if kept != [()]},
        "measures": [
            [score.name, score.label, score.error] for score in measures(line for run in runs for line in run.lines)
        ],
        "definitions": _definitions(places),
        "num_steps": len({line["step"] for run in runs for line in run.lines}),
        "num_drawn": len(steps),
    }


def column_name(metric: str, place: Place) -> str:
    """Such as `ratio/sequence_quantiles/3`: the fourth number of a list."""
    return "/".join((metric, *map(str, place)))


def rounded(value: Any) -> float | None:
    """To the digits that a curve shows, which keeps the page small. None where it is no number."""
    if not is_number(value):
        return None
    short = round(value, 6) if 0.5 < abs(value) < 2 else float(f"{value:.5g}")  # ratios move in millionths of 1
    return int(short) if short == int(short) else short


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """The name of each run; of runs that share a name the path."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.path) for run in runs]


def _run(run: RunFiles, label: str, steps: set[int], places: Mapping[str, Sequence[Place]]) -> dict[str, Any]:
    lines = [line for line in run.lines if line["step"] in steps]
    tokens = dict(zip((line["step"] for line in run.lines), _tokens(run), strict=True))
    columns = {
        column_name(name, place): [rounded(_at(line.get(name), place)) for line in lines]
        for name, known in places.items()
        for place in known
    }
    cold_start = [line for line in run.cold_start if is_number(line.get("step"))]
    cold_start = cold_start[::-1][:: math.ceil(len(cold_start) / MOST_LOSSES) or 1][::-1]  # the last loss among them
    return {
        "name": run.name,
        "label": label,
        "path": str(run.path),
        "state": run.state,
        "seed": str(run.recipe.get("seed", "?")),
        "overview": overview(run),
        "recipe": content_of(run.path / "recipe.yaml").decode(errors="replace"),
        "rerun": rerun_command(run),
        "environment": {str(key): str(value) for key, value in _environment(run).items()},
        "resumed": [line["step"] for line in run.history if line.get("event") == "resumed" and line.get("step")],
        "clips_sequences": section(run.recipe, "actor").get("importance_sampling_level") != "token",
        "steps": [line["step"] for line in lines],
        "tokens": [rounded(tokens[line["step"]]) for line in lines],
        "seconds": [rounded(line.get("time/elapsed_seconds")) for line in lines],
        "columns": {name: column for name, column in columns.items() if any(value is not None for value in column)},
        "cold_start": {name: [rounded(line.get(name)) for line in cold_start] for name in ("step", "loss")},
    }


def _environment(run: RunFiles) -> Mapping[str, Any]:
    return run.last("begun", "resumed").get("environment") or {}


def _tokens(run: RunFiles) -> Iterator[float]:
    """The tokens generated so far, at each line: their rate times the time of the rollout, summed."""
    rate, seconds = "throughput/generated_tokens_per_second", "time/rollout_seconds"
    known = [
        line[rate] * line[seconds] if is_number(line.get(rate)) and is_number(line.get(seconds)) else 0.0
        for line in run.lines
    ]
    return accumulate(known)


def _kept_steps(runs: Sequence[RunFiles]) -> set[int]:
    """The steps on the page: of very many evenly spread steps, the last step, and all with an evaluation."""
    steps = sorted({line["step"] for run in runs for line in run.lines})
    every = math.ceil(len(steps) / MOST_STEPS) or 1
    evaluated = {
        line["step"] for run in runs for line in run.lines if any(name.startswith("evaluation/") for name in line)
    }
    return {*steps[::every], *steps[-1:], *(evaluated if every > 1 else ())}


def _places(runs: Sequence[RunFiles]) -> dict[str, Sequence[Place]]:
    """By metric, the places of the numbers in lists; the empty place if the metric is no list."""
    known: dict[str, set[Place]] = {}
    for run in runs:
        for line in run.lines:
            for name, value in line.items():
                if name != "step":
                    known.setdefault(name, set()).update(_places_in(value))
    return {name: _spread(sorted(places)) for name, places in known.items() if places}


def _spread(places: Sequence[Place]) -> Sequence[Place]:
    in_lists = [place for place in places if place]  # numbers beside the lists are of another version
    return in_lists[:: math.ceil(len(in_lists) / MOST_CURVES)] if in_lists else places


def _places_in(value: Any) -> Iterator[Place]:
    if not isinstance(value, list):
        yield ()
        return
    for number, item in enumerate(value):
        yield from ((number, *rest) for rest in _places_in(item))


def _at(value: Any, place: Place) -> Any:
    for number in place:
        value = value[number] if isinstance(value, list) and number < len(value) else None
    return value


def _definitions(metrics: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """By metric of the runs: the name under which it is defined, the text, and what is healthy."""
    known = {name: definition for name in metrics if (definition := definition_of(name)) is not None}
    return {name: (general_name(name), definition.text, definition.healthy) for name, definition in known.items()}
