"""Make every result of the study that is missing: cold starts, the sweep of clip ranges, the comparison, the factors.

python -m studies.gspo_vs_grpo.run                        # all of it; interrupted, it goes on where it was
python -m studies.gspo_vs_grpo.run --only main factors/long
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from gspo.errors import UserError
from gspo.recipe.load import load_recipe
from studies.gspo_vs_grpo.arms import ARMS
from studies.gspo_vs_grpo.clips import chosen_clips
from studies.gspo_vs_grpo.jobs import BASE, RESULTS, Variant, factor_jobs, main_jobs, tuning_jobs
from studies.gspo_vs_grpo.runs import VARIANT, load_runs, variant_of
from studies.gspo_vs_grpo.tuned import tune
from studies.harness.execute import Task, has_start, make_start, side_by_side, train
from studies.harness.jobs import Job, as_arguments
from studies.harness.results import load_result

WORK = Path(__file__).parents[2] / "runs" / "gspo_vs_grpo"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is asked for, and where it is made."""

    results: Path
    work: Path  # models and run directories
    workers: int  # runs at the same time
    only: Sequence[str]  # experiments, or folders of them; none: all
    variant: Variant

    def wants(self, job: Job) -> bool:
        """Whether the run was asked for."""
        return not self.only or any(_lies_in(job, name) for name in self.only)

    def has(self, job: Job) -> bool:
        """Whether there is a result of just this run."""
        return load_result(self.results, job) is not None


def main() -> int:
    """Run what is asked for, in the order in which one thing needs another; 1 where runs broke."""
    study = _study()
    sweep = list(tuning_jobs(study.variant))
    is_whole = _run_missing(study, sweep)
    if not all(study.has(job) for job in sweep):
        if any(study.wants(job) for job in _later_jobs(study.variant)):
            sys.exit(
                "the comparison and the factors need the whole sweep, which is not there: make it with --only tune"
            )
        return int(not is_whole)
    tune(load_runs(study.results))
    clips = chosen_clips(study.results)
    is_whole &= _run_missing(study, main_jobs(clips, study.variant))
    is_whole &= _run_missing(study, factor_jobs(clips, study.variant))
    return int(not is_whole)


def _lies_in(job: Job, name: str) -> bool:
    return f"{job.name}/".startswith(f"{name}/")


def _later_jobs(variant: Variant) -> list[Job]:
    """Those after the sweep, by name: with any clip ranges, for these are not chosen yet."""
    clips = {arm.name: arm.clips["middle"] for arm in ARMS}
    return [*main_jobs(clips, variant), *factor_jobs(clips, variant)]


def _study() -> Study:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="such as tune, main, factors/long")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, each on one core (2)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results (the study's own)")
    parser.add_argument("--work", type=Path, default=WORK, help="for models and run directories (runs/gspo_vs_grpo)")
    parser.add_argument("--seeds", type=int, help="the first so many of each experiment only (all)")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="recipe keys changed in every run")
    options = parser.parse_args()
    extra = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in options.set)}
    variant = Variant(seeds=options.seeds, extra=extra)
    if complaint := _complaint(options, variant):
        parser.error(complaint)
    _keep_apart(options.results, variant)
    return Study(
        results=options.results.absolute(),
        work=options.work.absolute(),
        workers=options.jobs,
        only=options.only,
        variant=variant,
    )


def _complaint(options: argparse.Namespace, variant: Variant) -> str | None:
    """What is wrong with the options; UserError for what is wrong with the recipe that they make."""
    load_recipe(BASE, as_arguments(variant.extra))
    if options.jobs < 1 or (options.seeds is not None and options.seeds < 1):
        return "--jobs and --seeds must be at least 1"
    jobs = [*tuning_jobs(variant), *_later_jobs(variant)]
    for name in options.only:
        if not any(_lies_in(job, name) for job in jobs):
            return f"--only {name}: no such experiment; there are {', '.join(sorted({job.experiment for job in jobs}))}"
    return None


def _keep_apart(results: Path, variant: Variant) -> None:
    """Results that were made in another way stay by themselves."""
    if any(results.glob("*")) and variant_of(results) != variant:
        sys.exit(f"{results} has results made with other --seeds or --set: name another directory with --results")
    if variant != Variant():
        results.mkdir(parents=True, exist_ok=True)
        (results / VARIANT).write_text(json.dumps(asdict(variant)) + "\n", encoding="utf-8")


def _run_missing(study: Study, jobs: Iterable[Job]) -> bool:
    """Make the results that are wanted and not there, and before them the models they begin from; whether all came."""
    missing = [job for job in jobs if study.wants(job) and not study.has(job)]
    places = (study.results, study.work)
    starts = {job.start.name: job for job in missing if not has_start(job, *places)}
    cold = [Task(f"cold start {name}", make_start, (job, *places)) for name, job in starts.items()]
    runs = [Task(job.name, train, (job, *places)) for job in missing]
    return side_by_side(cold, study.workers) and side_by_side(runs, study.workers)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: results so far are kept, and the same command makes the rest", file=sys.stderr)
        sys.exit(130)
