"""The results of the study as it is now: of its arms, seeds, conditions and chosen clip ranges, and no others."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from studies.gspo_vs_grpo.clips import chosen_clips, has_choice
from studies.gspo_vs_grpo.jobs import Variant, factor_jobs, main_jobs, tuning_jobs
from studies.harness.jobs import Job, Named
from studies.harness.results import Result, Results, load_result

VARIANT = "variant.json"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Every result, by experiment and arm; and those that are missing or came of another recipe."""

    directory: Path
    variant: Variant  # how they were made
    found: Mapping[tuple[str, str], Results]
    missing: tuple[str, ...]

    def of(self, experiment: str, arm: Named) -> Results:
        """Those of an arm in an experiment, by seed."""
        return self.found.get((experiment, arm.name), {})


def load_runs(directory: Path) -> Runs:
    """Read what there is."""
    variant = variant_of(directory)
    found: dict[tuple[str, str], dict[int, Result]] = {}
    missing = []
    for job in _jobs(directory, variant):
        result = load_result(directory, job)
        if result is None:
            missing.append(job.name)
        else:
            found.setdefault((job.experiment, job.arm.name), {})[job.seed] = result
    return Runs(directory=directory, variant=variant, found=found, missing=tuple(missing))


def variant_of(directory: Path) -> Variant:
    """How the results in a directory were made, if not as arms.py has it."""
    path = directory / VARIANT
    return Variant(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else Variant()


def _jobs(directory: Path, variant: Variant) -> list[Job]:
    jobs = list(tuning_jobs(variant))
    if has_choice(directory):
        clips = chosen_clips(directory)
        jobs += [*main_jobs(clips, variant), *factor_jobs(clips, variant)]
    return jobs
