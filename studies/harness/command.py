"""The command of a study: every result that is missing is made, the models that runs begin from first."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.harness.execute import Task, has_start, make_start, side_by_side, train
from studies.harness.jobs import Job
from studies.harness.results import load_result


def make_all(description: str | None, jobs: Sequence[Job], *, results: Path, work: Path) -> None:
    """What the command line asks for; ends with 1 where runs broke, with 130 where a key was pressed."""
    try:
        sys.exit(_make(description, jobs, results=results, work=work))
    except KeyboardInterrupt:
        print("interrupted: results so far are kept, and the same command makes the rest", file=sys.stderr)
        sys.exit(130)


def _make(description: str | None, jobs: Sequence[Job], *, results: Path, work: Path) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = ", ".join(sorted({job.experiment for job in jobs}))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"such as {jobs[0].name}, or {named}")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, each on one core (2)")
    parser.add_argument("--results", type=Path, default=results, help="directory of the results (the study's own)")
    parser.add_argument("--work", type=Path, default=work, help="for models and run directories (in runs/)")
    options = parser.parse_args()
    places = (options.results.absolute(), options.work.absolute())
    for name in options.only:
        if not any(_lies_in(job, name) for job in jobs):
            parser.error(f"--only {name}: no such runs; there are {named}")
    missing = [job for job in jobs if _wants(job, options.only) and load_result(options.results, job) is None]
    starts = {job.start.name: job for job in missing if not has_start(job, *places)}
    cold = [Task(f"cold start {name}", make_start, (job, *places)) for name, job in starts.items()]
    runs = [Task(job.name, train, (job, *places)) for job in missing]
    is_whole = side_by_side(cold, options.jobs) and side_by_side(runs, options.jobs)
    return int(not is_whole)


def _wants(job: Job, only: Sequence[str]) -> bool:
    return not only or any(_lies_in(job, name) for name in only)


def _lies_in(job: Job, name: str) -> bool:
    return f"{job.name}/".startswith((f"{name}/", f"{name}_")) if "/" in name else job.experiment == name
