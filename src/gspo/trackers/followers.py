"""The processes that send a run to its trackers: begun with training, and not waited for long in the end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gspo.errors import UserError
from gspo.report.shapes import is_step
from gspo.run.plain_files import for_writing, read_json_lines, read_plain
from gspo.trackers.sender import home_of_trackers
from gspo.trackers.sent import read_sent
from gspo.trackers.track import log_of

# All of them together, at the end: enough for the last steps and a table. What a tracker could not take all through the
# training, it will hardly take in a minute; and whoever waits for the command has waited long enough.
WAIT_SECONDS = 15.0
_TERMINATE_SECONDS = 2.0  # between asking and killing
Note = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Follower:
    """One that was started."""

    name: str
    process: subprocess.Popen[bytes]


@contextmanager
def following(path: Path, names: Sequence[str], note: Note) -> Iterator[None]:
    """A context in which a run is followed for each tracker; what becomes of them is said in notes, never raised."""
    over = threading.Event()
    followers = [follower for name in dict.fromkeys(names) if (follower := _started(path, name, note, over))]
    seconds = WAIT_SECONDS
    try:
        yield
    except KeyboardInterrupt:  # who ends a run at once does not want to wait for this either
        seconds = 0.0
        raise
    finally:
        over.set()
        _finish(followers, path, seconds, note)


def _started(path: Path, name: str, note: Note, over: threading.Event) -> Follower | None:
    # -P: a file in the working directory that bears a module's name must not stand in for it. The modules' path is
    # training's, so that the package that was found there is the one that is imported.
    command = [sys.executable, "-P", "-m", "gspo.trackers.follow", str(path), name, str(os.getpid())]
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # the cores are training's
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        home_of_trackers(path).mkdir(exist_ok=True)
        with open(log_of(path, name), "ab", opener=for_writing) as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for training, whose end this process reads from its history
            )
    except (OSError, UserError) as error:
        note(f"tracker {name}: its process could not be started: {error}; once it can: gspo track {path} --to {name}")
        return None
    follower = Follower(name=name, process=process)
    threading.Thread(target=_tell_of_failure, args=(follower, path, note, over), daemon=True).start()
    return follower


def _tell_of_failure(follower: Follower, path: Path, note: Note, over: threading.Event) -> None:
    """Say at once what is told again in the end: a tracker that has failed at the first step can be fixed by then."""
    if follower.process.wait() and not over.is_set():
        why = _last_line(log_of(path, follower.name))
        note(f"tracker {follower.name} has failed ({why}); training goes on without it")


def _finish(followers: Sequence[Follower], path: Path, seconds: float, note: Note) -> None:
    deadline = time.monotonic() + seconds
    if seconds and (left := [follower.name for follower in followers if follower.process.poll() is None]):
        note(f"sending what is left to {', '.join(left)} ({seconds:g} s at most) …")
    try:
        for follower in followers:
            with suppress(subprocess.TimeoutExpired):
                follower.process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # on a Ctrl-C while it waits, too
        for follower in followers:
            is_late = _end(follower.process)
            if is_late or follower.process.returncode or _is_behind(follower.name, path):
                note(_shortfall(follower, path, is_late=is_late))


def _end(process: subprocess.Popen[bytes]) -> bool:
    """End a process with what it has started, if it has not ended by itself; whether that had to be."""
    if process.poll() is not None:
        return False
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_SECONDS)
            break
    return True


def _shortfall(follower: Follower, path: Path, *, is_late: bool) -> str:
    """What a tracker lacks, why, and how it is sent."""
    name, log, last_step = follower.name, log_of(path, follower.name), _last_step(path)
    try:
        sent = read_sent(home_of_trackers(path) / f"{name}.json")
        has = (
            f"{max(sent.step, 0)} of {max(last_step, 0)} steps{'' if sent.closed else ', not all of them for certain'}"
        )
    except UserError as error:
        has = error.what
    why = f"has failed ({_last_line(log)})" if follower.process.returncode else "has ended before the run"
    if is_late:
        why = "was not done in time"
    return f"tracker {name} {why}: has {has}; the rest: gspo track {path} --to {name} (log: {log})"


def _is_behind(name: str, path: Path) -> bool:
    """Whether one that thinks it is done is not: it may have taken the run for over."""
    with suppress(UserError):
        return read_sent(home_of_trackers(path) / f"{name}.json").step < _last_step(path)
    return True


def _last_step(path: Path) -> int:
    """-1 where there is none yet, not even the evaluation before training."""
    lines, _ = read_json_lines(path / "metrics.jsonl")
    return max((line["step"] for line in lines if is_step(line.get("step"))), default=-1)


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = read_plain(log)[-4000:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it has said nothing")
    return "its log cannot be read"
