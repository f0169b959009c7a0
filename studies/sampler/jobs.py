"""What is compared, as data: the tasks, the arms, the seeds, and the recipe of each run."""

from collections.abc import Iterator
from pathlib import Path

from studies.harness.jobs import Job, Overrides
from studies.objectives.arms import COLD, DEFAULT, SEQUENCE_CLIP, Arm, Start
from studies.objectives.jobs import BASE

RESULTS = Path(__file__).with_name("results")
SEEDS = (1, 2, 3, 4, 5)
STEPS, EVERY = 32, 16
QUERIES = {"rollout.queries_per_step": 16, "queries.procedural.size": 128}  # each comes four times in order
MIXED = Start(
    name="mixed",
    cold={"queries.procedural.max_terms": 6, "cold_start.steps": 500},  # what is longer is new to the runs
    task={"queries.procedural.min_terms": 2, "queries.procedural.max_terms": 10, "rollout.max_new_tokens": 120},
)
TASKS = {"sums of 5 to 7 terms": DEFAULT, "sums of 2 to 10 terms": MIXED}
ORDER = Arm(name="order", label="in order", what="`sampler: order`, the default", overrides={})
DIFFICULTY = Arm(
    name="difficulty",
    label="by difficulty",
    what="`sampler: difficulty`",
    overrides={"queries.sampler": "difficulty"},
)
GATE = Arm(
    name="gate",
    label="in order, with the gate",
    what="`sampler: order`, `rollout.dynamic_sampling: true`",
    overrides={"rollout.dynamic_sampling": True},
)
ARMS = (ORDER, DIFFICULTY, GATE)


def all_jobs() -> Iterator[Job]:
    """Seed by seed: interrupted, what there is compares."""
    for seed in SEEDS:
        for start in TASKS.values():
            run: Overrides = {**start.task, **SEQUENCE_CLIP, **QUERIES, "seed": seed, "steps": STEPS}
            evaluation: Overrides = {"evaluation.every": EVERY, "evaluation.num_queries": 256}
            for arm in ARMS:
                yield Job(
                    base=BASE,
                    experiment=start.name,
                    arm=arm,
                    seed=seed,
                    start=start,
                    overrides={**run, **evaluation, **arm.overrides},
                    cold_overrides={**COLD, **start.task, **start.cold},
                )
