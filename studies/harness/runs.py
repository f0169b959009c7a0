"""The results of a study as it is now: of its runs, and no others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from studies.harness.jobs import Job, Named
from studies.harness.results import Result, Results, load_result


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Every result, by experiment and arm; and those that are missing or came of another recipe."""

    directory: Path
    found: Mapping[tuple[str, str], Results]
    missing: tuple[str, ...]

    def of(self, experiment: str, arm: Named) -> Results:
        """Those of an arm in an experiment, by seed."""
        return self.found.get((experiment, arm.name), {})


def read_runs(directory: Path, jobs: Iterable[Job]) -> Runs:
    """Read what there is."""
    found: dict[tuple[str, str], dict[int, Result]] = {}
    missing = []
    for job in jobs:
        result = load_result(directory, job)
        if result is None:
            missing.append(job.name)
        else:
            found.setdefault((job.experiment, job.arm.name), {})[job.seed] = result
    return Runs(directory=directory, found=found, missing=tuple(missing))
