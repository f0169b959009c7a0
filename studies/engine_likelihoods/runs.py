"""The results of the study as it is now."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from studies.engine_likelihoods.arms import Arm
from studies.engine_likelihoods.jobs import all_jobs
from studies.harness.results import Result, Results, load_result


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Every result, by arm; and those that are missing or came of another recipe."""

    directory: Path
    found: Mapping[str, Results]
    missing: tuple[str, ...]

    def of(self, arm: Arm) -> Results:
        """Those of an arm, by seed."""
        return self.found.get(arm.name, {})


def load_runs(directory: Path) -> Runs:
    """Read what there is."""
    found: dict[str, dict[int, Result]] = {}
    missing = []
    for job in all_jobs():
        result = load_result(directory, job)
        if result is None:
            missing.append(job.name)
        else:
            found.setdefault(job.arm.name, {})[job.seed] = result
    return Runs(directory=directory, found=found, missing=tuple(missing))
