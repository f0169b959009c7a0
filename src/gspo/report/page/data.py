"""The runs as the page's JSON: columns of numbers, which runs are seeds of one arm, what became of each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import Any

from pydantic import ValidationError

from gspo.metrics.definitions import definition_of, general_name
from gspo.metrics.numbers import is_number
from gspo.metrics.words import WINDOW, diagnoses, first_and_last, measures
from gspo.recipe.sections import ActorConfig
from gspo.recipe.yaml_text import leaves
from gspo.report.run_files import RunFiles, labels_of, section
from gspo.run.plain_files import content_of

MOST_CURVES = 32  # of a list of numbers: its first ones
_SPANS = ("source/trainer_waited_seconds", "source/engine_sampled_seconds")  # no curves, but moments of a bar
_SAME_ARM = ("name", "seed", "output_dir", "checkpoint", "report")  # keys that change nothing about what is learned
_OF_EVENT = ("time", "event", "how", "step", "cold_start_step", "reason")
_GENERATED = "throughput/generated_tokens_per_second"


def run_data(runs: Sequence[RunFiles], *, live: bool = False) -> dict[str, Any]:
    """Return all that the page shows but the samples. `live`: the page fetches it again from its server."""
    arms, lines = arms_of(runs), [line for run in runs for line in run.lines]
    return {
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "live": live,
        "runs": [_run(run, label) for run, label in zip(runs, labels_of(runs), strict=True)],
        "arms": [{"label": label, "runs": [runs.index(run) for run in own]} for label, own in arms],
        "differences": differences([own[0] for _, own in arms]),
        "measures": [[score.name, score.label, score.error] for score in measures(lines)],
        "definitions": _definitions(dict.fromkeys(name for line in lines for name in line if name != "step")),
    }


def arms_of(runs: Sequence[RunFiles]) -> list[tuple[str, list[RunFiles]]]:
    """Runs that differ in nothing but the seed, in the order given, under labels that tell the arms apart."""
    by_recipe: dict[str, list[RunFiles]] = {}
    for run in runs:
        kept = {key: value for key, value in run.recipe.items() if key not in _SAME_ARM}
        by_recipe.setdefault(json.dumps(leaves(kept), sort_keys=True), []).append(run)
    labels = [_label(own) for own in by_recipe.values()]
    pairs = zip(labels, by_recipe.values(), strict=True)
    return [(label if labels.count(label) == 1 else f"{label} ({own[0].path})", own) for label, own in pairs]


def _label(runs: Sequence[RunFiles]) -> str:
    if len(runs) == 1:
        return runs[0].name
    common = commonprefix([run.name for run in runs]).rstrip("-_.0123456789")  # noqa: RUF071 (names, not paths)
    num_seeds = len({run.recipe.get("seed") for run in runs})
    count = f"{len(runs)} seeds" if num_seeds == len(runs) else f"{len(runs)} runs of {num_seeds} seed(s)"
    return f"{common or runs[0].name} ({count})"


def differences(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return each key whose value is not the same in all of these recipes, with each value."""
    recipes = [leaves(run.recipe) for run in runs]
    rows = {key: [own.get(key, "–") for own in recipes] for recipe in recipes for key in recipe}
    own = [(key, row) for key, row in rows.items() if key.split(".")[0] not in _SAME_ARM]
    return [(key, row) for key, row in own if len(set(row)) > 1]


def rounded(value: Any) -> float | None:
    """Round to the digits that a curve shows, which keeps the page small. None where it is no number."""
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
    begun = run.last("begun", "resumed")
    names = dict.fromkeys(name for line in run.lines for name in line if name != "step")
    columns = {name: [_shown(name, line.get(name)) for line in run.lines] for name in names}
    minutes = [rounded(line.get("time/elapsed_seconds", 0) / 60) for line in run.lines]
    # The tokens so far are their rate times the time that it is of, summed.
    time = f"time/{'total' if section(run.recipe, 'rollout').get('max_staleness') else 'rollout'}_seconds"
    tokens = accumulate((rounded(line.get(_GENERATED)) or 0) * (rounded(line.get(time)) or 0) for line in run.lines)
    return {
        "label": label,
        "seed": str(run.recipe.get("seed", "?")),
        "state": state_sentence(run),
        "introduction": begun.get("introduction", "").splitlines(),
        "diagnoses": named_diagnoses(run),
        "history": [[str(line.get(key) or "") for key in _OF_EVENT] for line in run.history],
        "notes": run.notes,
        "means": {label: [*map(rounded, ends)] for label, ends in first_and_last(run.lines)[1].items()},
        "recipe": content_of(run.path / "recipe.yaml").decode(errors="replace"),
        "environment": {key: str(value) for key, value in begun.get("environment", {}).items()},
        "resumed": [line["step"] for line in run.history if line["event"] == "resumed" and line["step"]],
        "phases": [now["step"] for then, now in pairwise(run.lines) if now.get("phase", 0) > then.get("phase", 0)],
        "clips_sequences": section(run.recipe, "actor").get("importance_sampling_level") != "token",
        "steps": [line["step"] for line in run.lines],
        "tokens": [*map(rounded, tokens)],
        "minutes": minutes,
        "time": f"{last:.3g} min" if (last := next(filter(None, reversed(minutes)), None)) else "–",
        "columns": {name: column for name, column in columns.items() if column != [None] * len(run.lines)},
        "cold_start": {name: [rounded(line[name]) for line in run.cold_start] for name in ("step", "loss")},
    }


def _definitions(metrics: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """The definitions by metric of the runs: the name under which it is defined, the text, and what is healthy."""
    defined = {name: definition for name in metrics if (definition := definition_of(name)) is not None}
    return {name: (general_name(name), definition.text, definition.healthy) for name, definition in defined.items()}


def state_sentence(run: RunFiles) -> str:
    """Return how far the run is, whether it is still running, and which command resumes it if it is not."""
    done = f"{run.num_steps} of {run.recipe['steps']} steps"
    reason, again = run.last("ended").get("reason"), f"it can be resumed: gspo resume {run.path}"
    return {
        "finished": f"finished: {done}" + (f"; ended by {reason}" if reason else ""),
        "running": f"still running: {done} so far",
        "stopped": f"stopped by {reason} after {done}; {again}",
        "interrupted": f"interrupted at once after {done}; {again}",
        "failed": f"failed after {done} ({again}): {reason}",
        "killed": f"killed, or crashed, after {done}; {again}",
        "unknown": f"{done}; nothing here says whether it still runs",
    }[run.state]


def named_diagnoses(run: RunFiles) -> list[str]:
    """Return each diagnosis that held at a step, in its last words, with the first and the last such step."""
    actor, steps = _actor(run.recipe), run.steps
    held: dict[str, tuple[str, int, int]] = {}
    for number in range(max(1, min(WINDOW, len(steps))), len(steps) + 1):
        step = steps[number - 1]["step"]
        for name, sentence in diagnoses(steps[:number], actor).items():
            held[name] = sentence, held[name][1] if name in held else step, step
    return [
        f"{sentence} (step {first}{'' if last == first else f' to {last}'}"
        f"{', and still at the end' if last == run.num_steps else ''})"
        for sentence, first, last in held.values()
    ]


def _actor(recipe: Mapping[str, Any]) -> ActorConfig:
    try:
        return ActorConfig.model_validate(section(recipe, "actor"))
    except ValidationError:  # of another version of gspo
        return ActorConfig()
