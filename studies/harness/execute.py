"""Runs and cold starts as processes of their own, a few at a time, each on one core."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.harness.cold import REPORT
from studies.harness.jobs import RECIPES_MODEL, Job, Overrides, as_arguments, from_model
from studies.harness.results import Result, collect

ROOT = Path(__file__).parents[2]
FAILED = "failed: "  # how gspo begins what it says of a run that could not go on
NOT_FINITE = "not finite"  # what it says then of one that diverged; a full disk, say, is no result
BULKY = ("model", "checkpoints")  # of a run directory; not needed once its result is written


class BrokenError(Exception):
    """A process ended in a way that says nothing about the arm that it ran."""


@dataclass(frozen=True)
class Task:
    """One process, and how what came of it is put on a line."""

    name: str
    make: Callable[..., str]
    arguments: tuple[Any, ...]


def side_by_side(tasks: Sequence[Task], workers: int) -> bool:
    """Do all tasks, `workers` at a time, with a line for each; whether none broke."""
    broken = 0
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(task.make, *task.arguments): task.name for task in tasks}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                try:
                    line = future.result()
                except BrokenError as error:
                    line = f"BROKEN, no result: {error}"
                    broken += 1
                print(f"{number}/{len(tasks)}  {futures[future]}  {line}", flush=True)
        except BaseException:  # a key was pressed, or the study itself is at fault: begin no more
            pool.shutdown(cancel_futures=True)
            raise
    return broken == 0


def has_start(job: Job, results: Path, work: Path) -> bool:
    """Whether the model that a run begins from is there, and its report."""
    if job.start is RECIPES_MODEL:
        return True
    return (model_of(job, work) / REPORT).is_file() and _start_report(job, results).is_file()


def make_start(job: Job, results: Path, work: Path) -> str:
    """The model that a run begins from; its report goes to the results."""
    directory = model_of(job, work)
    shutil.rmtree(directory, ignore_errors=True)  # what an interrupted one left
    _check(_python(["studies.harness.cold", str(job.base), str(directory), *as_arguments(job.cold_overrides)]))
    report = (directory / REPORT).read_text(encoding="utf-8")
    path = _start_report(job, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report, encoding="utf-8")
    known: Mapping[str, Any] = json.loads(report)
    return f"pass@1 {known['pass_at_1']:.3f}  {known['seconds']} s"


def train(job: Job, results: Path, work: Path, place: Overrides | None = None) -> str:
    """One run and its result; a run that diverged has a result that says so.

    `place` changes keys that say where the run is made, such as a server's address, and are no part of its recipe.
    """
    directory = work / "runs" / job.name
    shutil.rmtree(directory, ignore_errors=True)  # what an interrupted one left
    start = {} if job.start is RECIPES_MODEL else from_model(model_of(job, work))
    overrides = {**job.overrides, **(place or {}), **start, "output_dir": str(directory)}
    started = time.monotonic()
    done = _python(["gspo.cli", "train", str(job.base), *as_arguments(overrides)])
    seconds = time.monotonic() - started
    failed = _divergence(done.stderr)
    if failed is None:
        _check(done)
    result = collect(
        directory,
        digest=job.digest,
        overrides=job.overrides,
        failed=failed,
        seconds=seconds,
    )
    result.save(results / f"{job.name}.json")
    for name in BULKY:
        shutil.rmtree(directory / name, ignore_errors=True)
    return _line(result)


def model_of(job: Job, work: Path) -> Path:
    """Where the model lies that a run begins from."""
    return work / "models" / f"{job.start.name}-{job.cold_digest}"


def _start_report(job: Job, results: Path) -> Path:
    return results / "starts" / f"{job.start.name}.json"


def _python(module_and_arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *module_and_arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def _divergence(said: str) -> str | None:
    """What gspo says of a run that diverged, without where its files lie."""
    lines = (line for line in said.splitlines() if line.startswith(FAILED) and NOT_FINITE in line)
    return next((line.removeprefix(FAILED).partition(";")[0] for line in lines), None)


def _check(done: "subprocess.CompletedProcess[str]") -> None:
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise BrokenError(f"exit code {done.returncode}: {said[-1500:]}")


def _line(result: Result) -> str:
    rewards = result.values("reward/mean")
    course = f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}" if rewards else "no step"
    failure = f"  FAILED: {result.failed}" if result.failed else ""
    return f"{course}  {result.seconds['run']:.0f} s{failure}"
