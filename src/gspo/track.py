"""`gspo track`: it sends the steps of a run that its trackers lack."""

from collections.abc import Callable, Sequence
from pathlib import Path

from gspo.errors import RunError, UserError
from gspo.report.run_files import LAST, read_run, section
from gspo.trackers.send import read_state, send
from gspo.trackers.tracker import check_trackers


def track(path: Path, to: Sequence[str] | None, *, note: Callable[[str], object]) -> None:
    """Send what is missing to the trackers named, or else to those of the run's recipe.

    Raises UserError where there is no run, no tracker, no package for it, or a process that sends already; RunError
    where a tracker has failed, once the others have everything.
    """
    run = read_run(path)
    trackers = section(run.recipe, "report").get("trackers")
    names = dict.fromkeys(to or map(str, trackers if isinstance(trackers, list) else ()))
    if not names:
        fix = f"name one: gspo track {path} --to tensorboard"
        raise UserError("the run's recipe has no report.trackers", where=str(path), fix=fix)
    check_trackers(names, where="--to" if to else "report.trackers")
    failures = []
    for name in names:
        try:
            state = read_state(path / "trackers" / f"{name}.json")
            is_behind = not state["closed"] or run.num_steps > state["step"]
            num_sent, last = send(path, name, [LAST]) if is_behind else (0, state["step"])
            done = f"{num_sent} step(s) sent" if num_sent else "nothing new to send"
            note(f"tracker {name}: {done}; it has the run up to step {max(last, 0)}")
        except UserError:
            raise
        except Exception as error:  # whatever a library may raise, the others are sent to
            failures.append(f"tracker {name}: {type(error).__name__}: {error}")
    if failures:
        fix = "see to what it says; the same command then goes on from the step after the last one sent"
        raise RunError(f"{'; '.join(failures)}\n  fix: {fix}")
