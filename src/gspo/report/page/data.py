"""The runs as the page's JSON: a column of numbers for each metric, arms, recipes, and each run in words."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

from gspo.metrics.definitions import definition_of, general_name
from gspo.metrics.numbers import is_number
from gspo.metrics.words import first_and_last, measures
from gspo.report.page.arms import arms_of, differences
from gspo.report.page.overview import overview
from gspo.report.run_files import RunFiles, is_step, labels_of, section
from gspo.run.plain_files import content_of

MOST_CURVES = 32  # of a list of numbers: its first ones
_SPANS = ("source/trainer_waited_seconds", "source/engine_sampled_seconds")  # no curves, but moments of a bar


def run_data(runs: Sequence[RunFiles], *, live: bool = False) -> dict[str, Any]:
    """All that the page shows but the samples. `live`: the page fetches it again from its server."""
    arms = arms_of(runs)
    return {
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "live": live,
        "runs": [_run(run, label) for run, label in zip(runs, labels_of(runs), strict=True)],
        "arms": [{"label": arm.label, "runs": [runs.index(run) for run in arm.runs]} for arm in arms],
        "differences": differences(arms) if len(arms) > 1 else [],
        "measures": [
            [score.name, score.label, score.error] for score in measures(line for run in runs for line in run.lines)
        ],
        "definitions": _definitions(name for run in runs for line in run.lines for name in line if name != "step"),
    }


def rounded(value: Any) -> float | None:
    """To the digits that a curve shows, which keeps the page small. None where it is no number."""
    if not is_number(value):
        return None
    short = round(value, 6) if 0.5 < abs(value) < 2 else float(f"{value:.5g}")  # ratios move in millionths of 1
    return int(short) if short == int(short) else short


def _shown(name: str, value: Any) -> Any:
    """A number; or of a list, and the lists in it, the numbers in a row, as many as there is a curve for."""
    return _row(value)[: None if name in _SPANS else MOST_CURVES] if isinstance(value, list) else rounded(value)


def _row(value: Any) -> list[float | None]:
    return [number for item in value for number in _row(item)] if isinstance(value, list) else [rounded(value)]


def _run(run: RunFiles, label: str) -> dict[str, Any]:
    environment = section(run.last("begun", "resumed"), "environment")
    names = dict.fromkeys(name for line in run.lines for name in line if name != "step")
    columns = {name: [_shown(name, line.get(name)) for line in run.lines] for name in names}
    seconds = [line.get("time/elapsed_seconds") for line in run.lines]
    minutes = [rounded(number / 60) if is_number(number) else None for number in seconds]
    resumed = [line.get("step") for line in run.history if line.get("event") == "resumed"]
    cold_start = [line for line in run.cold_start if is_number(line.get("step"))]
    return {
        "name": run.name,
        "label": label,
        "path": str(run.path),
        "state": run.state,
        "seed": str(run.recipe.get("seed", "?")),
        "overview": overview(run),
        "means": {label: [*map(rounded, ends)] for label, ends in first_and_last(run.lines)[1].items()},
        "recipe": content_of(run.path / "recipe.yaml").decode(errors="replace"),
        "environment": {str(key): str(value) for key, value in environment.items()},
        "resumed": [step for step in resumed if is_step(step) and step],
        "clips_sequences": section(run.recipe, "actor").get("importance_sampling_level") != "token",
        "steps": [line["step"] for line in run.lines],
        "tokens": [*map(rounded, _tokens(run))],
        "minutes": minutes,
        "time": f"{last:.3g} min" if (last := next(filter(None, reversed(minutes)), None)) else "–",
        "columns": {name: column for name, column in columns.items() if column != [None] * len(run.lines)},
        "cold_start": {name: [rounded(line.get(name)) for line in cold_start] for name in ("step", "loss")},
    }


def _tokens(run: RunFiles) -> Iterator[float]:
    """The tokens generated so far, at each line: their rate times the time that it is of, summed."""
    is_ahead = section(run.recipe, "rollout").get("max_staleness")
    rate, seconds = "throughput/generated_tokens_per_second", f"time/{'total' if is_ahead else 'rollout'}_seconds"
    tokens = [
        line[rate] * line[seconds] if is_number(line.get(rate)) and is_number(line.get(seconds)) else 0.0
        for line in run.lines
    ]
    return accumulate(tokens)


def _definitions(metrics: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """By metric of the runs: the name under which it is defined, the text, and what is healthy."""
    defined = {name: definition for name in dict.fromkeys(metrics) if (definition := definition_of(name)) is not None}
    return {name: (general_name(name), definition.text, definition.healthy) for name, definition in defined.items()}
