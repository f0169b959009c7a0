"""What is compared, as data: the arms, the seeds, and the recipe of each run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from studies.harness.jobs import Job, Overrides
from studies.objectives.arms import Arm, Start

HERE = Path(__file__).parent
BASE, RESULTS = HERE / "base.yaml", HERE / "results"
EXPERIMENT = "sums"
SEEDS = (1, 2, 3)
STEPS = 60
START = Start(name="sums")
TERMS = {"short": (3, 4), "middle": (5, 6), "long": (8, 9)}  # of a sum
ASKED = {"short": 256, "middle": 256, "long": 256}  # in an evaluation


def _sums(name: str, size: int) -> dict[str, Any]:
    least, most = TERMS[name]
    task = {"task": "chain_sum", "min_terms": least, "max_terms": most, "min_digits": 1, "max_digits": 1, "size": size}
    return {"procedural": task}


def _suite(name: str) -> dict[str, Any]:
    return {"name": name, "queries": _sums(name, ASKED[name]), "temperature": 1.0, "reward": "reasoning_gym"}


COMMON: Overrides = {
    "steps": STEPS,
    "queries.procedural": None,
    "queries.sources": {name: _sums(name, 4000) for name in TERMS},
    "evaluation.num_queries": 0,
    "evaluation.suites": [_suite(name) for name in TERMS],
}
LAST = {"short": 1, "middle": 1, "long": 3}
PHASES = [
    {"from_step": 21, "queries": {"weights": {"short": 1, "middle": 3}}, "rollout": {"max_new_tokens": 80}},
    {"from_step": 41, "queries": {"weights": LAST}, "rollout": {"max_new_tokens": 128}},
]
GROWING = Arm(
    name="phases",
    label="three phases",
    what="short sums of up to 48 tokens, from step 21 middle ones of 80, from step 41 long ones of 128",
    overrides={"queries.weights": {"short": 1}, "rollout.max_new_tokens": 48, "phases": PHASES},
)
MIXED = Arm(name="mixed", label="all from the start", what="a third of each, up to 128 tokens", overrides={})
HARD = Arm(
    name="last",
    label="the last phase from the start",
    what="a fifth each of short and middle sums, the rest long, up to 128 tokens",
    overrides={"queries.weights": LAST},
)
ARMS = (GROWING, MIXED, HARD)


def all_jobs() -> Iterator[Job]:
    """Seed by seed: interrupted, what there is compares."""
    for seed in SEEDS:
        for arm in ARMS:
            overrides = {**COMMON, "seed": seed, **arm.overrides}
            yield Job(base=BASE, experiment=EXPERIMENT, arm=arm, seed=seed, start=START, overrides=overrides)
