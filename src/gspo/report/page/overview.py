"""What a run was and what came of it, in words and a few numbers: the top of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gspo.metrics.numbers import is_number
from gspo.metrics.words import WINDOW, diagnoses, measured, measures
from gspo.recipe.sections import ActorConfig
from gspo.report.page.told import history_told, seconds_of, state_told
from gspo.report.run_files import RunFiles
from gspo.report.shapes import section


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
        state=state_told(run),
        introduction=_introduction(run),
        scores=scores(run),
        seconds=seconds_of(run),
        diagnoses=named_diagnoses(run),
        history=history_told(run),
        notes=run.notes,
    )


def scores(run: RunFiles) -> list[tuple[str, str]]:
    """pass@1 and reward of each evaluated set with their standard errors, reward, response length: first → last."""
    rows = []
    for measure in measures(run.lines):
        lines = [line for line in run.lines if is_number(line.get(measure.name))]
        told = [measured(line, measure) for line in lines]
        if len(lines) > 1:
            rows.append((measure.label, f"{told[0]} → {told[-1]}"))
        elif lines:
            rows.append((measure.label, f"{told[0]} after step {lines[0]['step']}"))
    for about, name, digits in (("reward", "reward/mean", 3), ("response tokens", "response/mean_tokens", 1)):
        known = [line[name] for line in run.steps if is_number(line.get(name))]
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


def _actor(recipe: Mapping[str, Any]) -> ActorConfig:
    try:
        return ActorConfig.model_validate(recipe.get("actor", {}))
    except ValidationError:  # of another version of gspo
        return ActorConfig()


def _introduction(run: RunFiles) -> list[str]:
    """The run's own words; for want of them, its recipe's."""
    if told := run.last("begun", "resumed").get("introduction"):
        return str(told).splitlines()
    model, queries = section(run.recipe, "model"), section(run.recipe, "queries")
    architecture, task = section(model, "architecture").get("model_type"), section(queries, "procedural").get("task")
    return [
        f"model: {model.get('path') or architecture}",
        f"queries: {queries.get('path') or task or 'from Python'}",
    ]
