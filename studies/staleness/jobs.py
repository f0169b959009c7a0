"""What is compared, as data: the arms, how stale, the seeds, and the recipe of each run."""

from collections.abc import Iterator
from pathlib import Path

from studies.harness.jobs import Job, Overrides
from studies.objectives.arms import CLIP_FRACTION, COLD, DEFAULT, SEQUENCE_CLIP, Arm
from studies.objectives.jobs import BASE

RESULTS = Path(__file__).with_name("results")
SEEDS = (1, 2, 3, 4, 5)
ETAS = (0, 1, 2, 4, 8)  # rollout.max_staleness
STEPS = 20
ARMS = (
    Arm(name="gspo", label="GSPO", what="the default, π_old of the engine", overrides=SEQUENCE_CLIP),
    Arm(
        name="gspo_fraction",
        label="GSPO, range sets itself",
        what="`clip_fraction: 0.15`",
        overrides={**SEQUENCE_CLIP, "actor.clip_fraction": CLIP_FRACTION},
    ),
    Arm(
        name="grpo",
        label="GRPO",
        what="`importance_sampling_level: token`",
        overrides={"actor.importance_sampling_level": "token"},
    ),
    Arm(
        name="decoupled",
        label="GSPO, decoupled",
        what="`old_logprobs: recompute`, `correction: decoupled`",
        overrides={**SEQUENCE_CLIP, "actor.old_logprobs": "recompute", "actor.correction": "decoupled"},
    ),
)


def experiment(eta: int) -> str:
    """The folder of the results of a staleness."""
    return f"staleness_{eta}"


def all_jobs() -> Iterator[Job]:
    """Seed by seed: interrupted, what there is compares."""
    for seed in SEEDS:
        for eta in ETAS:
            # Sampling and training take turns: from step η + 1 on, every token is η steps old, in every run alike.
            stale: Overrides = {"rollout.max_staleness": eta, "rollout.in_turn": True} if eta else {}
            for arm in ARMS:
                yield Job(
                    base=BASE,
                    experiment=experiment(eta),
                    arm=arm,
                    seed=seed,
                    start=DEFAULT,
                    overrides={"seed": seed, "steps": STEPS, **stale, **arm.overrides},
                    cold_overrides=COLD,
                )
