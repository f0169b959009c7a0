"""What is compared, as data: the tasks, the arms, how their learning rates are chosen, and the recipe of each run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from studies.harness.jobs import Job, Overrides

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RATES = HERE / "rates.json"  # task → arm → the learning rate that was chosen; written by studies.baselines.rates
TASKS = ("instructions", "sums")
CONDITIONED = "sums"  # the task of the conditions: its runs are the shorter ones
SEEDS = (1, 2, 3, 4, 5)
STEPS = 16
GRID = (3e-6, 1e-5, 3e-5, 1e-4)  # the same for every arm
GRID_SEED, GRID_STEPS = 11, 12
BY_LENGTH: Overrides = {"actor.clip_low": 3e-3, "actor.clip_high": 4e-3}  # for tens of tokens
TOKEN: Overrides = {"actor.importance_sampling_level": "token"}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison: a task's recipe with these keys."""

    name: str
    label: str
    what: str
    overrides: Overrides = field(default_factory=dict)


GSPO = Arm(name="gspo", label="GSPO", what="`clip_low: 3e-3`, `clip_high: 4e-3`", overrides=BY_LENGTH)
GRPO = Arm(name="grpo", label="GRPO", what="`importance_sampling_level: token`, 0.2/0.27", overrides=TOKEN)
MASK = Arm(
    name="grpo_mask",
    label="GRPO, sequences masked",
    what="GRPO, `correction: geometric_mask`",
    overrides={**TOKEN, "actor.correction": "geometric_mask"},
)
ARMS = (
    GSPO,
    Arm(name="gspo_paper", label="GSPO, the paper's range", what="the defaults: 3e-4/4e-4"),
    Arm(
        name="gspo_fraction",
        label="GSPO, range sets itself",
        what="`clip_fraction: 0.15`",
        overrides={**BY_LENGTH, "actor.clip_fraction": 0.15},
    ),
    Arm(
        name="gspo_token",
        label="GSPO-token",
        what="`importance_sampling_level: sequence_token`, 3e-3/4e-3",
        overrides={**BY_LENGTH, "actor.importance_sampling_level": "sequence_token"},
    ),
    GRPO,
    Arm(
        name="grpo_narrow",
        label="GRPO, narrow range",
        what="GRPO, `clip_low: 0.05`, `clip_high: 0.05`",
        overrides={**TOKEN, "actor.clip_low": 0.05, "actor.clip_high": 0.05},
    ),
    MASK,
    *(
        Arm(name=name, label=label, what=f"`surrogate: {name}`", overrides={"actor.surrogate": name})
        for name, label in (("dr_grpo", "Dr. GRPO"), ("dapo", "DAPO"), ("cispo", "CISPO"))
    ),
    Arm(
        name="ppo",
        label="PPO",
        what="`surrogate: ppo`, `critic.trunk: shared`, `critic.optimizer.lr: 1e-3`",
        overrides={"actor.surrogate": "ppo", "critic.trunk": "shared", "critic.optimizer.lr": 1e-3},
    ),
)
# Where GSPO and GRPO may part: the optimiser steps for one rollout batch, and the age of its responses.
CONDITIONS: dict[str, Overrides] = {
    "mini_batches_1": {"actor.mini_batches": 1},
    "updates_16": {"actor.epochs": 4},  # four passes over the four mini-batches
    "age_4": {"rollout.max_staleness": 4, "rollout.in_turn": True, "actor.correction": "ignore"},
    "vllm_bfloat16": {  # whose likelihoods are π_old: the paper's §5.4
        "rollout.engine": "vllm",
        "rollout.vllm": {"python": ".venv-vllm/bin/python", "dtype": "bfloat16"},
        "actor.old_logprobs": "engine",
    },
}


def grid_jobs() -> Iterator[Job]:
    """Every arm with every learning rate of the grid, a seed that the study does not use, fewer steps."""
    for task in TASKS:
        for arm in ARMS:
            for rate in GRID:
                own = Arm(name=f"{arm.name}_{rate:g}", label=arm.label, what=arm.what, overrides=arm.overrides)
                run: Overrides = {"steps": GRID_STEPS, "evaluation.num_queries": 0}
                yield _job(task, f"{task}_grid", own, GRID_SEED, rate, run)


def study_jobs() -> Iterator[Job]:
    """Seed by seed, each arm at the rate that the grid chose; none before it has."""
    rates = json.loads(RATES.read_text(encoding="utf-8")) if RATES.exists() else {}
    for seed in SEEDS:
        for task, chosen in rates.items():
            for arm in ARMS:
                # Here the trainer samples, so that there is nothing to mask: two seeds show that it is GRPO's very run.
                if arm is not MASK or seed in SEEDS[:2]:
                    yield _job(task, task, arm, seed, chosen[arm.name], {"steps": STEPS})
    for seed in SEEDS[:3] if CONDITIONED in rates else ():
        for condition, overrides in CONDITIONS.items():
            for arm in (GSPO, GRPO):
                rate, run = rates[CONDITIONED][arm.name], {"steps": STEPS, **overrides}
                yield _job(CONDITIONED, f"{CONDITIONED}_{condition}", arm, seed, rate, run)


def all_jobs() -> Iterator[Job]:
    """The grid first."""
    yield from grid_jobs()
    yield from study_jobs()


def _job(task: str, experiment: str, arm: Arm, seed: int, rate: float, run: Overrides) -> Job:
    overrides = {"seed": seed, **arm.overrides, "actor.optimizer.lr": rate, **run}
    return Job(base=HERE / f"{task}.yaml", experiment=experiment, arm=arm, seed=seed, overrides=overrides)
