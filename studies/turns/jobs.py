"""What is compared, as data: the arms, the seeds, and the recipe of each run."""

from collections.abc import Iterator
from pathlib import Path

from studies.harness.jobs import Job
from studies.objectives.arms import Arm, Start

HERE = Path(__file__).parent
BASE, RESULTS = HERE.parents[1] / "recipes" / "quiz.yaml", HERE / "results"
EXPERIMENT = "quiz"
SEEDS = (1, 2, 3, 4, 5)
STEPS = 30
START = Start(name="quiz")
BY_TRAJECTORY = {"actor.turn_credit": "trajectory"}
# A mean over tokens has gradients of norm 2 to 4, all of which max_grad_norm makes 1; a constant divisor's are below 1.
UNBOUND = {"actor.optimizer.max_grad_norm": 1000.0}
GSPO = Arm(
    name="gspo",
    label="GSPO",
    what="`importance_sampling_level: sequence`, `advantage: group`, `length_norm: own`",
    overrides={
        **BY_TRAJECTORY,
        "actor.importance_sampling_level": "sequence",
        "actor.advantage": "group",
        "actor.length_norm": "own",
    },
)
TRAJECTORY = Arm(
    name="trajectory",
    label="GSPO-token, credit by trajectory",
    what="`turn_credit: trajectory`",
    overrides=BY_TRAJECTORY,
)
ARMS = (
    GSPO,
    Arm(
        name="gspo_unbound",
        label="GSPO, gradients as they come",
        what="the same, `max_grad_norm: 1000`",
        overrides={**GSPO.overrides, **UNBOUND},
    ),
    TRAJECTORY,
    Arm(name="turn", label="GSPO-token, credit by turn", what="the recipe: `turn_credit: return_to_go`", overrides={}),
    Arm(
        name="turn_own",
        label="GSPO-token, credit by turn, mean over tokens",
        what="`length_norm: own`",
        overrides={"actor.length_norm": "own"},
    ),
    Arm(
        name="turn_own_unbound",
        label="the same, gradients as they come",
        what="`length_norm: own`, `max_grad_norm: 1000`",
        overrides={"actor.length_norm": "own", **UNBOUND},
    ),
)


def all_jobs() -> Iterator[Job]:
    """Seed by seed: interrupted, what there is compares."""
    for seed in SEEDS:
        for arm in ARMS:
            overrides = {"seed": seed, "steps": STEPS, **arm.overrides}
            yield Job(base=BASE, experiment=EXPERIMENT, arm=arm, seed=seed, start=START, overrides=overrides)
