"""What is compared, as data: the tasks, the arms, the seeds, and the recipe of each run."""

from collections.abc import Iterator
from pathlib import Path

from studies.harness.jobs import Job, Overrides
from studies.objectives.arms import DEFAULT, SEQUENCE_CLIP, Arm, Start
from studies.objectives.jobs import job_of

RESULTS = Path(__file__).with_name("results")
SEEDS = (1, 2, 3, 4, 5)
STEPS, EVERY = 32, 16
RUN: Overrides = {
    **SEQUENCE_CLIP,
    "rollout.queries_per_step": 16,
    "queries.procedural.size": 128,  # each comes four times in order
    "steps": STEPS,
    "evaluation.every": EVERY,
    "evaluation.num_queries": 256,
}
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
            for arm in ARMS:
                yield job_of(start.name, arm, seed, start, RUN)
