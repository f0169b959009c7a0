"""What a run was and what came of it, in words and a few numbers: the top of the page."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from gspo.config import Actor
from gspo.report.diagnoses import WINDOW, diagnoses
from gspo.report.run_files import RunFiles


@dataclass(frozen=True, kw_only=True)
class Overview:
    """One run's summary, every entry as it is to be read."""

    name: str
    state: str
    introduction: Sequence[str]  # model, data, objective, arithmetic
    scores: Sequence[tuple[str, str]]  # what, and from → to
    seconds: float
    diagnoses: Sequence[str]
    history: Sequence[str]
    notes: Sequence[str]


def overview(run: RunFiles) -> Overview:
    """The summary of a run, whatever of it there is so far."""
    return Overview(
        name=run.name,
        state=_state(run),
        introduction=_introduction(run),
        scores=scores(run),
        seconds=_seconds(run),
        diagnoses=named_diagnoses(run),
        history=[_event(line) for line in run.history],
        notes=run.notes,
    )


def scores(run: RunFiles) -> list[tuple[str, str]]:
    """pass@1 of each evaluated set with its standard error, reward, response length: first → last."""
    rows = []
    names = dict.fromkeys(name for line in run.lines for name in line if _is_number(line, name))
    for name in (name for name in names if name.endswith("/pass_at_1")):
        lines, error = [line for line in run.lines if _is_number(line, name)], name.removesuffix("pass_at_1")
        told = [f"{line[name]:.3f} ± {line.get(f'{error}standard_error', math.nan):.3f}" for line in lines]
        about = f"pass@1 ({name.removeprefix('evaluation/').removesuffix('/pass_at_1')})"
        if len(lines) > 1:
            rows.append((about, f"{told[0]} → {told[-1]}"))
        else:
            rows.append((about, f"{told[0]} after step {lines[0]['step']}"))
    for about, name, digits in (("reward", "reward/mean", 3), ("response tokens", "response/mean_tokens", 1)):
        known = [line[name] for line in run.steps if _is_number(line, name)]
        if known:
            rows.append((about, f"{known[0]:.{digits}f} → {known[-1]:.{digits}f}"))
    return rows


def named_diagnoses(run: RunFiles) -> list[str]:
    """Each diagnosis that has held at some step, as it was last told, with the steps at which it held."""
    actor, steps = _actor(run.recipe), run.steps
    found: dict[str, tuple[str, list[int]]] = {}
    for number in range(min(WINDOW, len(steps)), len(steps) + 1):
        for name, sentence in diagnoses(steps[:number], actor).items() if number else ():
            held = found.get(name, ("", []))[1]
            found[name] = (sentence, [*held, steps[number - 1]["step"]])
    end = run.num_steps
    return [
        f"{sentence} (step {held[0]}{'' if held[-1] == held[0] else f' to {held[-1]}'}"
        f"{', and still at the end' if held[-1] == end else ''})"
        for sentence, held in found.values()
    ]


def duration(seconds: float) -> str:
    """Such as `3 min 11 s` or `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _actor(recipe: Mapping[str, Any]) -> Actor:
    try:
        return Actor.model_validate(recipe.get("actor", {}))
    except ValidationError:  # of another version of gspo
        return Actor()


def _state(run: RunFiles) -> str:
    done = f"{run.num_steps} of {run.recipe['steps']} steps"
    end = run.last("ended")
    return {
        "finished": f"finished: {done}",
        "running": f"still running: {done} so far",
        "stopped": f"stopped by {end.get('reason')} after {done}; it can be resumed: gspo resume {run.path}",
        "interrupted": f"interrupted at once after {done}; it can be resumed: gspo resume {run.path}",
        "failed": f"failed after {done}: {end.get('reason')}",
        "killed": f"killed, or crashed, after {done}; it can be resumed: gspo resume {run.path}",
        "unknown": f"{done}; nothing here says whether it still runs",
    }[run.state]


def _introduction(run: RunFiles) -> list[str]:
    """The run's own words; for want of them, its recipe's."""
    if told := run.last("begun", "resumed").get("introduction"):
        return str(told).splitlines()
    model, queries = _section(run.recipe, "model"), _section(run.recipe, "queries")
    architecture, task = _section(model, "architecture").get("model_type"), _section(queries, "procedural").get("task")
    return [
        f"model: {model.get('path') or architecture}",
        f"queries: {queries.get('path') or task or 'from Python'}",
    ]


def _seconds(run: RunFiles) -> float:
    """What all its processes took: to their end, or to the last sign of life of one that has none."""
    end = run.last("ended")
    seconds = float(end.get("seconds", 0.0))
    last = run.history[-1] if run.history else {}
    if last.get("event") in ("begun", "resumed"):
        until = time.time() if run.state == "running" else _last_written(run)
        with suppress(KeyError, TypeError, ValueError):  # a line that says no time
            seconds += max(0.0, until - datetime.fromisoformat(last["time"]).timestamp())
    if not run.history:
        name = "time/total_seconds"
        seconds = sum(line[name] for line in run.steps if _is_number(line, name))
    return seconds


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty where a recipe of another version has something else there."""
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _is_number(line: Mapping[str, Any], name: str) -> bool:
    value = line.get(name)
    return isinstance(value, int | float) and math.isfinite(value)


def _last_written(run: RunFiles) -> float:
    logs = [path for name in ("metrics.jsonl", "cold_start.jsonl") if (path := run.path / name).exists()]
    return max((path.stat().st_mtime for path in logs), default=0.0)


def _event(line: Mapping[str, Any]) -> str:
    where = f"at step {line.get('step')}"
    if not line.get("step"):
        where = (
            f"at step {line['cold_start_step']} of the cold start" if line.get("cold_start_step") else "at the start"
        )
    told = {"begun": "begun", "resumed": f"resumed {where}"}.get(str(line.get("event")))
    if told is None:
        reason = f" ({line['reason']})" if line.get("reason") else ""
        told = f"{line.get('how')} {where}{reason}"
    return f"{line.get('time')}: {told}"
