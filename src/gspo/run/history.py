"""What happened to a run, for whoever looks at it later: begun, resumed, ended, and how."""

import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from signal import Signals
from typing import Any

from gspo.errors import RunError, UserError
from gspo.run.interrupt import Stopped
from gspo.run.plain_files import for_writing
from gspo.run.process_identity import process_identity
from gspo.run.run import Run
from gspo.run.summary import introduction

HISTORY = "history.jsonl"


def record_beginning(run: Run, *, resumed: bool) -> None:
    """A line for a process that begins the run or takes it up: who, where, with what, and at which step."""
    parts = run.parts
    _append(
        run,
        {
            "event": "resumed" if resumed else "begun",
            "process": os.getpid(),
            "process_identity": process_identity(os.getpid()),
            "seconds": run.elapsed,
            "host": socket.gethostname(),
            "working_directory": run.about["working_directory"],
            "introduction": introduction(run.recipe, parts.policy, parts.queries, parts.functions),
            "environment": run.about["environment"],
        },
    )


def record_end(run: Run, error: BaseException | None = None) -> None:
    """A line for how the process left the run: `finished`, `stopped` by a signal, `interrupted` at once, `failed`."""
    how, reason = "finished", None
    if run.stopped_by is not None:
        how, reason = "stopped", Signals(run.stopped_by).name
    if isinstance(error, KeyboardInterrupt):
        how, reason = "interrupted", None
    elif error is not None and not isinstance(error, Stopped):
        # A message may quote what has no encoding, such as half a character of a file's name.
        said = str(error).encode("utf-8", "backslashreplace").decode()
        how, reason = "failed", said or type(error).__name__
    with suppress(RunError, UserError):  # the disk may be what it has ended of
        _append(run, {"event": "ended", "how": how, "reason": reason, "seconds": run.elapsed})


def _append(run: Run, line: dict[str, Any]) -> None:
    progress = run.progress
    place = {"cold_start_step": progress.cold_steps, "step": progress.steps}
    _end_last_line(run.directory.path / HISTORY)
    run.directory.append(HISTORY, {"time": datetime.now(UTC).isoformat(timespec="seconds"), **line, **place})


def _end_last_line(path: Path) -> None:
    """After a process that was killed as it wrote: or the next line would be lost with that one."""
    # A file that cannot be written is named with the line to come.
    with suppress(OSError), open(path, "ab+", opener=for_writing) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
