"""The runs of the study: which there are, and the recipe of each."""

from collections.abc import Iterator
from pathlib import Path

from studies.harness.jobs import Job, Overrides
from studies.objectives.arms import (
    COLD,
    CRITIC_SEED,
    CRITIC_TRIALS,
    CUTS,
    DEFAULT,
    LENGTH_RUN,
    LENGTHS,
    OBJECTIVE_RUN,
    OBJECTIVES,
    RANGES,
    SEEDS,
    TRIAL_RUN,
    UNBOUND,
    Arm,
    Start,
)

BASE = Path(__file__).with_name("base.yaml")
RESULTS = Path(__file__).with_name("results")
OBJECTIVE, TRIAL = "objectives", "critic"


def all_jobs() -> Iterator[Job]:
    """Both parts, seed by seed: interrupted, what there is compares."""
    for arm in CRITIC_TRIALS:
        yield job_of(TRIAL, arm, CRITIC_SEED, DEFAULT, TRIAL_RUN)
    for seed in SEEDS:
        for arm in (*OBJECTIVES, *UNBOUND):
            yield job_of(OBJECTIVE, arm, seed, DEFAULT, OBJECTIVE_RUN)
    for seed in SEEDS:
        for length in (*LENGTHS, *CUTS[:-1]):
            for arm in RANGES:
                run = {**LENGTH_RUN, **length.overrides}
                yield job_of(length.name, arm, seed, length.start, run)


def job_of(experiment: str, arm: Arm, seed: int, start: Start, run: Overrides) -> Job:
    """The run of an arm, from a start's model."""
    return Job(
        base=BASE,
        experiment=experiment,
        arm=arm,
        seed=seed,
        start=start,
        overrides={**start.task, "seed": seed, **run, **arm.overrides},
        cold_overrides={**COLD, **start.task, **start.cold},
    )
