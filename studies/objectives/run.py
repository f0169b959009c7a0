"""Make every result of the study that is missing, the models that runs begin from first.

python -m studies.objectives.run                                 # all of it; interrupted, it goes on where it was
python -m studies.objectives.run --only objectives length_16
"""

import argparse
import sys
from pathlib import Path

from studies.harness.execute import Task, has_start, make_start, side_by_side, train
from studies.harness.jobs import Job
from studies.harness.results import load_result
from studies.objectives.jobs import RESULTS, all_jobs

WORK = Path(__file__).parents[2] / "runs" / "objectives"


def main() -> int:
    """Run what is asked for; 1 where runs broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="such as objectives/gspo_1, length_16")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, each on one core (2)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results (the study's own)")
    parser.add_argument("--work", type=Path, default=WORK, help="for models and run directories (runs/objectives)")
    options = parser.parse_args()
    places = (options.results.absolute(), options.work.absolute())
    jobs = list(all_jobs())
    for name in options.only:
        if not any(_lies_in(job, name) for job in jobs):
            parser.error(
                f"--only {name}: no such runs; there are {', '.join(sorted({job.experiment for job in jobs}))}"
            )
    missing = [job for job in jobs if _wants(job, options.only) and load_result(options.results, job) is None]
    starts = {job.start.name: job for job in missing if not has_start(job, *places)}
    cold = [Task(f"cold start {name}", make_start, (job, *places)) for name, job in starts.items()]
    runs = [Task(job.name, train, (job, *places)) for job in missing]
    is_whole = side_by_side(cold, options.jobs) and side_by_side(runs, options.jobs)
    return int(not is_whole)


def _wants(job: Job, only: list[str]) -> bool:
    return not only or any(_lies_in(job, name) for name in only)


def _lies_in(job: Job, name: str) -> bool:
    return f"{job.name}/".startswith((f"{name}/", f"{name}_")) if "/" in name else job.experiment == name


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: results so far are kept, and the same command makes the rest", file=sys.stderr)
        sys.exit(130)
