"""What a run was and what became of it, in words and a few numbers: the top of the page."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gspo.metrics.words import WINDOW, diagnoses
from gspo.recipe.sections import ActorConfig
from gspo.report.run_files import RunFiles

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
    """Each diagnosis that held at a step, in its last words, with the first and the last such step."""
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
        return ActorConfig.model_validate(recipe.get("actor", {}))
    except ValidationError:  # of another version of gspo
        return ActorConfig()
