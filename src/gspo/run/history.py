"""What happened to a run, for whoever looks at it later: begun, resumed, ended, and how."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from signal import Signals
from typing import Any

from gspo.errors import RunError, Stopped, UserError, encodable
from gspo.run.run import Run

HISTORY = "history.jsonl"


def record_start(run: Run, introduction: str) -> None:
    """A line for a process that begins the run or resumes it."""
    _append(
        run,
        event="resumed" if run.is_resumed else "begun",
        process=os.getpid(),
        host=socket.gethostname(),
        working_directory=run.about["working_directory"],
        introduction=introduction,
        environment=run.about["environment"],
    )


@contextmanager
def end_recorded(run: Run) -> Iterator[None]:
    """A line for how the process leaves the run: `finished`, `stopped` by a signal, `interrupted` at once, `failed`."""
    try:
        yield
    except BaseException as error:
        _append_end(run, error)
        raise
    _append_end(run, None)


def _append_end(run: Run, error: BaseException | None) -> None:
    how, reason = "finished", run.progress.reason_for_end(run.recipe.steps)
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped):
        how = "interrupted"
    elif error is not None and not isinstance(error, Stopped):
        how, reason = "failed", encodable(str(error)) or type(error).__name__
    elif run.stopped_by is not None:
        how, reason = "stopped", Signals(run.stopped_by).name
    with suppress(RunError, UserError):  # the disk may be what it has ended of
        _append(run, event="ended", how=how, reason=reason)


def _append(run: Run, **line: Any) -> None:
    steps, num_cold = run.progress.steps, run.recipe.cold_start.steps
    place = {"cold_start_step": steps if run.in_cold_start else num_cold, "step": 0 if run.in_cold_start else steps}
    time = datetime.now(UTC).isoformat(timespec="seconds")
    run.directory.append(HISTORY, {"time": time, **line, "seconds": run.clock.elapsed, **place})
