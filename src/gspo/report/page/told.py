"""What became of a run, in words: whether it goes on, how it ended, where it would be taken up, how long it took."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from gspo.metrics.numbers import is_number
from gspo.report.run_files import RunFiles
from gspo.report.shapes import section
from gspo.run.checkpoint.store import CHECKPOINTS, COLD_CHECKPOINTS, COLD_START, position_of


def state_told(run: RunFiles) -> str:
    """How far the run is, whether it goes on, and what goes on with it if it does not."""
    done = f"{run.num_steps} of {run.recipe['steps']} steps"
    end, again = run.last("ended"), _resumption(run)
    return {
        "finished": f"finished: {done}",
        "running": f"still running: {_so_far(run) or done + ' so far'}",
        "stopped": f"stopped by {end.get('reason')} after {_so_far(run) or done}; {again}",
        "interrupted": f"interrupted at once after {_so_far(run) or done}; {again}",
        "failed": f"failed after {_so_far(run) or done} ({again}): {end.get('reason')}",
        "killed": f"killed, or crashed, after {_so_far(run) or done}; {again}",
        "unknown": f"{done}; nothing here says whether it still runs",
    }[run.state]


def _so_far(run: RunFiles) -> str:
    """Where a run is in its cold start; empty beyond that."""
    if run.num_steps or not run.cold_start:
        return ""
    total, last = section(run.recipe, "cold_start").get("steps"), run.cold_start[-1]
    loss = f", loss {last['loss']:.3f}" if is_number(last.get("loss")) else ""
    return f"{last.get('step')} of {total} steps of the cold start{loss}"


def _resumption(run: RunFiles) -> str:
    of_cold_start = (run.path / COLD_START / "manifest.json").exists()
    where = "from the end of its cold start" if of_cold_start else "from the start, for it has no checkpoint"
    for folder, phase in ((COLD_CHECKPOINTS, " of the cold start"), (CHECKPOINTS, "")):
        positions = [position_of(path.parent.name) for path in (run.path / folder).glob("*/manifest.json")]
        if newest := max((position for position in positions if position is not None), default=None):
            where = f"from {newest}{phase}"
    return f"it can be resumed, {where}: gspo resume {run.path}"


def seconds_of(run: RunFiles) -> float:
    """What all its processes took: to their end, or to the last line of one that has none."""
    last = run.history[-1] if run.history else {}
    seconds = float(last["seconds"]) if is_number(last.get("seconds")) else 0.0
    if last.get("event") == "ended":
        return seconds
    if run.state == "running":
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # a line that says no time
            seconds += max(0.0, time.time() - datetime.fromisoformat(last["time"]).timestamp())
    name = "time/elapsed_seconds"
    return max([seconds, *(line[name] for line in run.lines[-1:] if is_number(line.get(name)))])


def history_told(run: RunFiles) -> list[str]:
    """A sentence for each line of the history, and for each end that there is no line of."""
    return list(_events(run))


def _events(run: RunFiles) -> Iterator[str]:
    under_way = False
    for line in run.history:
        begins = line.get("event") in ("begun", "resumed")
        if begins and under_way:
            yield "killed, or crashed, some time after that"
        under_way = begins
        yield _event(line)
    if run.state == "killed":
        yield "killed, or crashed, some time after that"


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
