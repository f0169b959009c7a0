"""Make every result of the study that is missing: a cold start for each seed first, then the runs of each precision.

python -m studies.engine_likelihoods.run --vllm-python .venv-vllm/bin/python      # all of it; interrupted, it goes on
python -m studies.engine_likelihoods.run --seeds 0 1                              # some of the seeds
python -m studies.engine_likelihoods.run --seeds 0 --set steps=3 --results /tmp/r --work /tmp/w    # does it work?

A server's weights are those of one run at a time. So there is a server for each precision and a run at a time on each:
two runs side by side, on two cores.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from gspo.errors import UserError
from gspo.recipe.load import load_recipe
from studies.engine_likelihoods.arms import DTYPES, SEEDS
from studies.engine_likelihoods.jobs import BASE, RESULTS, all_jobs
from studies.engine_likelihoods.server import KEY_VARIABLE, vllm_servers
from studies.harness.execute import Task, has_start, make_start, model_of, side_by_side, train
from studies.harness.jobs import Job, Overrides, as_arguments
from studies.harness.results import load_result

WORK = Path(__file__).parents[2] / "runs" / "engine_likelihoods"


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the study is made."""

    results: Path
    work: Path  # models, run directories, servers' logs
    python: str  # that has vLLM


def main() -> int:
    """Run what is asked for; 1 where runs broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="the interpreter that has vLLM")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="some of the seeds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results (the study's own)")
    parser.add_argument("--work", type=Path, default=WORK, help="for models and runs (runs/engine_likelihoods)")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="recipe keys changed in every run")
    options = parser.parse_args()
    extra = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in options.set)}
    if extra and options.results == RESULTS:
        parser.error("--set makes another study: name another directory with --results")
    load_recipe(BASE, as_arguments(extra))
    python = str(Path(options.vllm_python).absolute())
    places = Places(results=options.results.absolute(), work=options.work.absolute(), python=python)
    missing = [job for job in all_jobs(options.seeds, extra) if load_result(places.results, job) is None]
    return int(not _make(missing, places))


def _make(jobs: Sequence[Job], places: Places) -> bool:
    """Make the results, and before them the models they begin from; whether all came."""
    if not jobs:
        return True
    own = (places.results, places.work)
    starts = {job.start.name: job for job in jobs if not has_start(job, *own)}
    cold = [Task(f"cold start {name}", make_start, (job, *own)) for name, job in starts.items()]
    if not side_by_side(cold, len(DTYPES)):
        return False
    lanes = {dtype: [job for job in jobs if job.overrides["rollout.vllm.dtype"] == dtype] for dtype in DTYPES}
    wanted = [dtype for dtype in DTYPES if lanes[dtype]]
    with vllm_servers(places.python, model_of(jobs[0], places.work), wanted, places.work) as (key, urls):
        os.environ[KEY_VARIABLE] = key
        with ThreadPoolExecutor(len(wanted)) as pool:
            futures = [pool.submit(_run_lane, lanes[dtype], urls[dtype], own) for dtype in wanted]
            whole = [future.result() for future in futures]
    return all(whole)


def _run_lane(jobs: Sequence[Job], url: str, places: tuple[Path, Path]) -> bool:
    """Those of one server, one after the other."""
    server: Overrides = {"rollout.vllm.urls": [url]}
    return side_by_side([Task(job.name, train, (job, *places, server)) for job in jobs], 1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: results so far are kept, and the same command makes the rest", file=sys.stderr)
        sys.exit(130)
