"""`gspo track`: what a run has written is sent to its trackers, once or until the run has ended."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from gspo.errors import RunError, UserError
from gspo.report.run_files import read_run, state_of
from gspo.report.shapes import section
from gspo.run.plain_files import read_json_lines
from gspo.trackers.sender import Sender, home_of_trackers, sending
from gspo.trackers.tracker import check_trackers

POLL_SECONDS = 1.0


def track(path: Path, to: Sequence[str] | None, *, follow: bool, note: Callable[[str], object]) -> None:
    """Send what has not been sent of a run, to the trackers named or else to those of its recipe.

    Raises UserError where there is no run, no tracker, no package for it, or another process that sends already;
    RunError where a tracker has failed, once the others have everything.
    """
    run = read_run(path)
    own = section(run.recipe, "report").get("trackers")
    names = list(dict.fromkeys(to or map(str, own if isinstance(own, list) else ())))
    if not names:
        fix = f"name one: gspo track {path} --to tensorboard"
        raise UserError("the run's recipe has no report.trackers", where=str(path), fix=fix)
    check_trackers(names, where="--to" if to else "report.trackers")
    with ExitStack() as stack:
        senders = [stack.enter_context(sending(run, name, wait=False)) for name in names]
        failures = send(senders, path, follow=follow)
    for sender in (sender for sender in senders if sender.name not in failures):
        done = f"{sender.num_sent} step(s) sent" if sender.num_sent else "nothing new to send"
        note(f"tracker {sender.name}: {done}; it has the run up to step {max(sender.step, 0)}")
    if failures:
        what = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures.items())
        fix = "see to what it says; the same command then goes on from the step after the last one sent"
        raise RunError(f"tracker {what}\n  fix: {fix}")


def send(senders: Sequence[Sender], path: Path, *, follow: bool) -> Mapping[str, Exception]:
    """Send what there is, with `follow` until the run has ended; what the trackers have raised that failed, by name."""
    left, failures = list(senders), {}
    while left:
        is_over = not is_under_way(path)  # asked before the last lines are read, or some could come in between
        for sender in tuple(left):
            try:
                sender.send(is_over=is_over)
                if is_over or not follow:
                    left.remove(sender)
                    sender.close()
            except Exception as error:  # whatever a library may raise, the others go on
                failures[sender.name] = error
                left = [other for other in left if other is not sender]
        if left:
            time.sleep(POLL_SECONDS)
    return failures


def is_under_way(path: Path) -> bool:
    """Whether the run goes on, as far as can be told: a process of another machine may."""
    history, _ = read_json_lines(path / "history.jsonl")
    state = state_of(path, history)  # alone: read_run would read all metrics every second
    return state == "running" or (state == "unknown" and bool(history) and history[-1].get("event") != "ended")


def log_of(path: Path, name: str) -> Path:
    """Where the process that follows a run for a tracker says what goes on."""
    return home_of_trackers(path) / f"{name}.log"
