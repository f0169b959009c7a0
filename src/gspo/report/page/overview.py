"""What a run was and what became of it, in words and a few numbers: the top of the page."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gspo.metrics.words import WINDOW, diagnoses
from gspo.recipe.sections import ActorConfig
from gspo.report.run_files import RunFiles
from gspo.report.shapes import section

_OF_EVENT = ("time", "event", "how", "step", "cold_start_step", "reason")


def overview(run: RunFiles) -> dict[str, Any]:
    """What a run was, whatever of it there is so far."""
    return {
        "state": state_sentence(run),
        "introduction": str(run.last("begun", "resumed").get("introduction") or "").splitlines(),
        "diagnoses": named_diagnoses(run),
        "history": [[str(line.get(key) or "") for key in _OF_EVENT] for line in run.history],
        "notes": list(run.notes),
    }


def state_sentence(run: RunFiles) -> str:
    """How far the run is, whether it is still running, and which command resumes it if it is not."""
    done = f"{run.num_steps} of {run.recipe['steps']} steps"
    end, again = run.last("ended"), f"it can be resumed: gspo resume {run.path}"
    return {
        "finished": f"finished: {done}" + (f"; ended by {end['reason']}" if end.get("reason") else ""),
        "running": f"still running: {done} so far",
        "stopped": f"stopped by {end.get('reason')} after {done}; {again}",
        "interrupted": f"interrupted at once after {done}; {again}",
        "failed": f"failed after {done} ({again}): {end.get('reason')}",
        "killed": f"killed, or crashed, after {done}; {again}",
        "unknown": f"{done}; nothing here says whether it still runs",
    }[run.state]


def named_diagnoses(run: RunFiles) -> list[str]:
    """Each diagnosis that held at a step, in its last words, with the steps at which it held."""
    actor, steps = _actor(run.recipe), run.steps
    sentences: dict[str, str] = {}
    held: dict[str, list[int]] = {}
    for number in range(max(1, min(WINDOW, len(steps))), len(steps) + 1):
        for name, sentence in diagnoses(steps[:number], actor).items():
            sentences[name] = sentence
            held.setdefault(name, []).append(steps[number - 1]["step"])
    return [
        f"{sentence} (step {held[name][0]}{'' if held[name][-1] == held[name][0] else f' to {held[name][-1]}'}"
        f"{', and still at the end' if held[name][-1] == run.num_steps else ''})"
        for name, sentence in sentences.items()
    ]


def rerun_command(run: RunFiles) -> str:
    """What runs the recipe again, under another name, from the directory in which the run was started."""
    name = f"name={run.name}-again"
    home = run.last("begun", "resumed").get("working_directory")
    recipe = str((run.path / "recipe.yaml").absolute())
    queries = section(run.recipe, "queries")
    if not run.recipe.get("reward") or not (queries.get("path") or queries.get("procedural")):
        return f'gspo.train(gspo.load_recipe({json.dumps(recipe)}, ["{name}", "output_dir=null"]), queries=…, reward=…)'
    go = f"cd {shlex.quote(str(home))} && " if home else ""
    return f"{go}gspo train {shlex.quote(recipe)} {shlex.quote(name)} output_dir=null"


def _actor(recipe: Mapping[str, Any]) -> ActorConfig:
    try:
        return ActorConfig.model_validate(recipe.get("actor", {}))
    except ValidationError:  # of another version of gspo
        return ActorConfig()
