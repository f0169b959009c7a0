"""The runs of the study, and the recipe of each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from studies.engine_likelihoods.arms import ARMS, COLD, SEEDS, Start
from studies.harness.jobs import Job, Overrides

BASE = Path(__file__).with_name("base.yaml")
RESULTS = Path(__file__).with_name("results")
EXPERIMENT = "main"


def all_jobs(seeds: Sequence[int] = SEEDS, extra: Overrides | None = None) -> Iterator[Job]:
    """Seed by seed: interrupted, what there is compares. `extra` changes keys of every run."""
    for seed in seeds:
        for arm in ARMS:
            yield Job(
                base=BASE,
                experiment=EXPERIMENT,
                arm=arm,
                seed=seed,
                start=Start(seed=seed),
                overrides={"seed": seed, **arm.overrides, **(extra or {})},
                cold_overrides={**COLD, "seed": seed, **(extra or {})},
            )
